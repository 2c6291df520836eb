//! A chat on a terminal: the state of the terminal, and keys pressed during an answer.
#![cfg(unix)]

use crate::permutation::Permutation;
use crate::process::program;
use nix::pty::{OpenptyResult, openpty};
use nix::sys::termios::{Termios, tcgetattr};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A timeout for everything in these tests.
const LONG: Duration = Duration::from_secs(20);

/// A chat on a pseudo-terminal.
struct Chat {
    child: Child,
    keys: File,
    terminal: OwnedFd,
    before: Termios,
    /// The lines of stderr.
    stderr: Receiver<String>,
}

impl Chat {
    fn start(path: &Path, flags: &[&str]) -> Chat {
        let OpenptyResult { master, slave } = openpty(None, None).unwrap();
        let before = tcgetattr(&slave).unwrap();
        let mut command = program();
        command
            .arg("run")
            .arg(path)
            .args(["--device", "cpu", "-c", "512"])
            .args(flags);
        command.env("TERM", "xterm").stderr(Stdio::piped());
        command
            .stdin(slave.try_clone().unwrap())
            .stdout(slave.try_clone().unwrap());
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            stderr
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line))
        });
        // Drain the terminal, so that writing to it does not block.
        let mut screen = File::from(master.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut drawn = [0; 4096];
            while screen.read(&mut drawn).is_ok_and(|count| count > 0) {}
        });
        let chat = Chat {
            child,
            keys: File::from(master),
            terminal: slave,
            before,
            stderr: lines,
        };
        chat.waits_for("chat: ");
        chat.edits();
        chat
    }

    /// Waits for a line of stderr that contains `text`.
    fn waits_for(&self, text: &str) {
        let end = Instant::now() + LONG;
        let mut all = Vec::new();
        while let Ok(line) = self.stderr.recv_timeout(end.saturating_duration_since(Instant::now())) {
            if line.contains(text) {
                return;
            }
            all.push(line);
        }
        panic!("'{text}' is missing on stderr: {all:?}");
    }

    fn keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the end of the program and returns its exit code.
    fn ends(&mut self) -> Option<i32> {
        let end = Instant::now() + LONG;
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return status.code(),
                None => assert!(Instant::now() < end, "the program does not end"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the line editor controls the terminal.
    fn edits(&self) {
        let end = Instant::now() + LONG;
        while tcgetattr(&self.terminal).unwrap() == self.before {
            assert!(Instant::now() < end, "the terminal stays as it is");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Chat {
    fn drop(&mut self) {
        // The program still runs if the test failed.
        let _ = self.child.kill();
    }
}

/// Guards against a terminal without echo after a signal at the prompt.
#[test]
fn a_signal_at_the_prompt_gives_the_terminal_back() {
    let (_dir, path) = Permutation::answering(&[b"ok"]).file();
    for signal in ["-TERM", "-HUP"] {
        let mut chat = Chat::start(&path, &[]);
        let id = chat.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        assert_eq!(chat.ends(), Some(130), "{signal}");
        assert_eq!(tcgetattr(&chat.terminal).unwrap(), chat.before, "{signal}");
    }
}

/// Guards against losing keys typed during an answer.
#[test]
fn keys_pressed_during_an_answer_are_the_next_line() {
    let (_dir, path) = Permutation::repeating(&[b"a", b"b"]).file();
    for (early, late) in [("/set top-k 7\n", ""), ("/set top", "-k 7\r")] {
        let mut chat = Chat::start(&path, &["-n", "400", "--greedy"]);
        chat.keys("p\r");
        // The line editor has restored the terminal: an answer runs.
        let end = Instant::now() + LONG;
        while tcgetattr(&chat.terminal).unwrap() != chat.before {
            assert!(Instant::now() < end, "no answer begins");
        }
        chat.keys(early);
        chat.waits_for("finish: length");
        chat.edits();
        chat.keys(late);
        chat.waits_for("top-k 7");
        chat.keys("/exit\r");
        assert_eq!(chat.ends(), Some(0));
        assert_eq!(tcgetattr(&chat.terminal).unwrap(), chat.before);
    }
}
