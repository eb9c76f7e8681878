"""rdzv-kube: what Kubernetes is about to do to a node, or to a pod, told to rdzvd in time.

In: nodes and pods of a cluster, by list and watch (`following`), and the nodes that rdzvd knows.
Out: drains with a deadline, and cordons (`reconciling`), which `plan` decides from the two states
alone. It remembers nothing: what it has done is in rdzvd, marked by the reason, so it may be
restarted, or run twice, and misses nothing while it or rdzvd is away. It never lifts what somebody
else has ordered, and changes nothing in Kubernetes. Nothing else of rdzv imports it, or the client
of Kubernetes, which only `following` loads.
"""
