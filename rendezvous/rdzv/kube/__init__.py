"""rdzv-kube: drains and cordons nodes of rdzvd before Kubernetes takes their machines or pods away.

In: nodes and pods of a cluster, by list and watch (`following`), and the nodes that rdzvd knows.
Out: drains with a deadline, and cordons (`reconciling`), which `plan` decides from these two states
alone. It is stateless: its drains and cordons are in rdzvd, marked by their reason. So it may be
restarted, or run twice, and misses nothing while it or rdzvd is away. It never lifts the drains and
cordons of others, and changes nothing in Kubernetes. Nothing else in rdzv imports it, or the
Kubernetes client, which only `following` loads.
"""
