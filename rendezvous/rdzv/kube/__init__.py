"""rdzv-kube: drains and cordons rdzvd's nodes before Kubernetes removes their machines or pods.

In: nodes and pods of a cluster, by list and watch (`following`), and the nodes that rdzvd knows.
Out: drains with a deadline, and cordons (`reconciling`), which `plan` decides from these two states
alone. It is stateless: rdzvd keeps its drains and cordons, marked by their reason. So it can be
restarted or run twice, and catches up after it or rdzvd was down. It never lifts drains or cordons
set by others, and changes nothing in Kubernetes. Nothing else in rdzv imports it, and only
`following` loads the Kubernetes client.
"""
