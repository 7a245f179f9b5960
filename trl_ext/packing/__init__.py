"""Pack a padded batch into one row without padding or repeated prompts, and map results back."""
