//! The shared-memory ring.
