"""One job on this node. The core decides; nothing here blocks the event loop."""
