//! One thread owns all tracees.
