//! Drains the rings of the targets into a session's perf.data.
