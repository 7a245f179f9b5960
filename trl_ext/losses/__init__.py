"""Terms of the DPO loss that TRL does not have, in plain torch, and how metrics of several ranks are combined."""
