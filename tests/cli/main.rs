//! Tests of the program: fields, exit codes, error lines, streams. Needs an adapter; a software adapter is enough.

mod build;
mod commands;
mod errors;
#[path = "../golden/mod.rs"]
mod golden;
mod imagine;
mod narrowing;
mod paging;
mod pipelines;
mod plan;
mod skills;
mod sources;
mod streams;
mod tools;
