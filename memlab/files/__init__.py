"""A `Trace` in files, and out of them.

`store` saves and loads memlab's own, and turns to the others by suffix or content: `perfetto` and `snapshot` write
trace events and memory snapshots (`instants` gives their times); `pickles`, `stacks` and `snapshot_reader` read a
snapshot, which may come from a stranger (`checks`).
"""
