"""A job's life: the rules for each command and each state, one module for each stage.

In: a command and the draft of the next state. Out: the changed draft and its events. `refusals`
has every refusal, `conditions` every reason to ignore a command; `rendezvous` has the table that
leads to them.
"""
