"""What ranks and engines lack on a machine without a GPU (the setting `cluster.device` `cpu`)."""
