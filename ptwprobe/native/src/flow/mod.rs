//! From packets and code to the control flow.

pub mod code;
pub mod context;
