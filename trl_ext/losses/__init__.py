"""DPO loss terms that TRL does not have, in plain torch, and metrics averaged over all ranks."""
