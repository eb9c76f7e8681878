"""rdzv-kube: drains and cordons rdzvd's nodes before Kubernetes removes their machines or pods.

In: a cluster's nodes and pods, by list and watch (`following`), and the nodes known to rdzvd. Out:
drains with a deadline, and cordons (`reconciling`), which `plan` decides from these two states
alone. It is stateless: rdzvd keeps its drains and cordons, marked by their reason. It can therefore
be restarted or run twice, and catches up after it or rdzvd was down. It never lifts drains or
cordons set by others, and changes nothing in Kubernetes. Nothing else in rdzv imports it, and only
`following` loads the Kubernetes client.
"""
