"""From the lengths of a batch to a plan on the device."""
