//! The command-line program, in [`cli`].

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
