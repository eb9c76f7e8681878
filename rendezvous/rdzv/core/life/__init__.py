"""The life of a job: the rules for each command and each state, in one module per stage.

Input: a command and the draft of the next state. Output: the changed draft and its events. The
table of commands is in `rendezvous`. A function `refuse_*` has every reason to refuse its command.
"""
