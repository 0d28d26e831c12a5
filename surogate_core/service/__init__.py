"""What the core serves to its own parts that are distributions: commands, the conformance kit and their libraries.

One module for each subject, each a list of names. A name may change in any release: those distributions require the
core of their own version. Other plugins import from `surogate_core.plugin`.
"""
