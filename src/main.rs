//! The command-line program. Everything it does is in [`cli`]; the engine is the library.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
