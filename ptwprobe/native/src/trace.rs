//! From a perf.data file to hits.
