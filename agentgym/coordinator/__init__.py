"""The asynchronous loop: leases, groups, batches, supervision."""
