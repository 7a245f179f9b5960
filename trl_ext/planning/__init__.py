"""Which log-prob passes run, and why: policy, old policy, reference; and which rows and tokens of them."""
