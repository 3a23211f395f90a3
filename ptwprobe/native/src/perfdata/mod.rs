//! perf.data: the writer and the reader.
