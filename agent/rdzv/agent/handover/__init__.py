"""From one agent to the next on a node: instance, runners, their state and what they leave."""
