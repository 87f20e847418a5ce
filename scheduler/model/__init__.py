"""What is to be planned: records, bounds, costs, roles, and the query tiles of a batch."""
