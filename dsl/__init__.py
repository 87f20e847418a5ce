"""What users write: attention variants, extra inputs and KV formats."""
