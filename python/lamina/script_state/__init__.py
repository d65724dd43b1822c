# SPDX-License-Identifier: Apache-2.0
"""State of a script: what its objects and functions can reach, what that holds, and who reads and writes it.

`kinds` says what is plain, large, the script's own. `holders` read and fill objects, for all that looks into them.
`walk` goes through all that can be reached, with `generators`, and `changes` are made on other ranks. `content` tells
whether something has changed, `aliases` which ways lead to it. `uses` reads in source what a function does with a name.
`names` reads in code which names it has, with all that it calls; `places` are what several have. Traces are put back by
these, changes of a step's body are brought to all ranks, and state that modules share is watched
(`lamina.shared_state`).

[Note: shared state] The user's rule is in docs/how-it-works.md. Beyond it:

A statement that makes a new value of the old one is an update, which is read in source; without it every value is the
microbatch's own. A microbatch that has set nothing sees what was set last. No other one comes between the two halves of
an update. Modules that call others between them live on one rank with these, as do those that an autograd function's
backward uses by more than calls.

An attribute may hold a dictionary, a list, an array, an object, also with slots, or a generator: what that holds counts
as the attribute. So does a tensor, no buffer, that modules share and one of them writes in place. Numbers in it are as
in attributes. Putting something into a dictionary is no change until it is replaced: so caches are filled.

Names are those of closures, default arguments, files, classes, functions' attributes and threads. Functions that one
calls are followed by name, in tables, as methods, behind decorators, caches and properties. A change concerns those
that use the part that has changed, on ranks where a function uses it at all. Functions that only update something, or
put it into a cache, keep it on each rank for itself.

Nobody sees state that is reached through none of these, such as `gc` and `sys.modules`, views of one tensor in several
attributes, and changes in the first step after the trace's call took another way. The middle of lists of more than
20,000 elements is not looked at, nor all of arrays of more than 1 MiB and of objects with more than 1,000 others.

Changes that a step's body makes are brought for the 3,000 objects that are nearest to it. Results in caches, places of
iterators, and more than plain values, tensors and containers in objects of installed packages stay on the rank that
leads.
"""
