"""The life of a job: the rules for each command and each state, in one module per stage.

Input: a command and the draft of the next state. Output: the changed draft and its events.
`refusals` contains every reason to refuse a command, and `conditions` every reason to ignore one.
The dispatch table is in `rendezvous`.
"""
