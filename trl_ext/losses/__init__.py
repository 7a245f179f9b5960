"""DPO loss terms that TRL does not have, in plain torch."""
