//! What a policy would have hit on a recorded trace: the shipping policies, replayed.

pub mod level;
pub mod optimum;
pub mod replay;
pub mod trace;
