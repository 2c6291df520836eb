//! What each step of a network computes, one file per operator.
