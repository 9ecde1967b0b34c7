"""``loadbox top``: every group and rank of this host, live."""
