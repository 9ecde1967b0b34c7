"""``loadbox export``: the ranks of this host as Prometheus metrics.  Needs ``prometheus_client``, the extra ``metrics``."""
