//! A chat on a terminal: what becomes of the terminal, and of keys that are pressed while an answer runs.
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

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);

/// A chat on a terminal of its own.
struct Chat {
    child: Child,
    keys: File,
    terminal: OwnedFd,
    before: Termios,
    /// What it says on stderr, line by line.
    said: Receiver<String>,
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
        let (sender, said) = channel();
        std::thread::spawn(move || {
            stderr
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line))
        });
        // Somebody has to read what is drawn, or the terminal is full.
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
            said,
        };
        chat.hears("a chat: ");
        chat.edits();
        chat
    }

    /// Waits for a line with `text`.
    fn hears(&self, text: &str) {
        let end = Instant::now() + LONG;
        let mut all = Vec::new();
        while let Ok(line) = self.said.recv_timeout(end.saturating_duration_since(Instant::now())) {
            if line.contains(text) {
                return;
            }
            all.push(line);
        }
        panic!("'{text}' was not said: {all:?}");
    }

    fn keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the end of the program: its exit code.
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

    /// Waits until an editor has taken over the terminal.
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
        // After a test that failed; otherwise it is gone.
        let _ = self.child.kill();
    }
}

/// A signal at the prompt leaves a terminal that shows no keys.
#[test]
fn a_signal_at_the_prompt_gives_the_terminal_back() {
    let (_dir, path) = Permutation::saying(&[b"ok"]).file();
    for signal in ["-TERM", "-HUP"] {
        let mut chat = Chat::start(&path, &[]);
        let id = chat.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        assert_eq!(chat.ends(), Some(130), "{signal}");
        assert_eq!(tcgetattr(&chat.terminal).unwrap(), chat.before, "{signal}");
    }
}

/// What is typed while an answer runs is lost: a whole line, or the beginning of one.
#[test]
fn keys_pressed_during_an_answer_are_the_next_line() {
    let (_dir, path) = Permutation::repeating(&[b"a", b"b"]).file();
    for (early, late) in [("/set top-k 7\n", ""), ("/set top", "-k 7\r")] {
        let mut chat = Chat::start(&path, &["-n", "400", "--greedy"]);
        chat.keys("p\r");
        // The editor has given the terminal away: an answer runs.
        let end = Instant::now() + LONG;
        while tcgetattr(&chat.terminal).unwrap() != chat.before {
            assert!(Instant::now() < end, "no answer begins");
        }
        chat.keys(early);
        chat.hears("finish: length");
        chat.edits();
        chat.keys(late);
        chat.hears("top-k 7");
        chat.keys("/exit\r");
        assert_eq!(chat.ends(), Some(0));
        assert_eq!(tcgetattr(&chat.terminal).unwrap(), chat.before);
    }
}
