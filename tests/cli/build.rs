//! Runs the program, and makes a small model for it.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// The program, without the environment variables of the tests that it would read.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cmf-gpu"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CMF_GPU_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// The result of a run of the program.
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn of(output: Output) -> Ran {
        for stream in [&output.stdout, &output.stderr] {
            assert!(
                !stream.contains(&0x1b),
                "an escape character on a stream that is no terminal"
            );
        }
        let ran = Ran {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        };
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        ran
    }

    /// The JSON object on stdout of a successful run.
    pub fn json(&self) -> Value {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        assert_eq!(self.stdout.lines().count(), 1, "{}", self.stdout);
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// Asserts the exit code, the error line, and with `--json` the object. Returns the message.
    pub fn fails(&self, code: i32, kind: &str) -> String {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        let lines: Vec<&str> = self.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(lines.len(), 1, "{}", self.stderr);
        let message = lines[0]
            .strip_prefix(&format!("error: {kind}: "))
            .unwrap_or_else(|| panic!("{}", lines[0]));
        if !self.stdout.is_empty() {
            let object: Value = serde_json::from_str(&self.stdout).unwrap();
            assert_eq!(object["error"]["kind"], kind);
            assert_eq!(object["error"]["message"], message);
        }
        message.to_string()
    }
}

pub fn run(arguments: &[&str]) -> Ran {
    Ran::of(program().args(arguments).output().unwrap())
}

pub fn run_env(arguments: &[&str], env: &[(&str, &str)]) -> Ran {
    Ran::of(program().args(arguments).envs(env.iter().copied()).output().unwrap())
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A small model with random weights, converted once for all tests of this program.
pub fn model() -> &'static str {
    static MODEL: OnceLock<String> = OnceLock::new();
    MODEL.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("llama_tied.cmf");
        let out = out.to_str().unwrap().to_string();
        let src = crate::golden::dir("llama_tied");
        let ran = run(&["convert", src.to_str().unwrap(), "-o", &out, "--quant", "f16"]);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        out
    })
}

/// The golden greedy continuation of a prompt of that model: prompt, continuation.
pub fn golden(prompt: usize) -> (Vec<u32>, Vec<u32>) {
    let text = std::fs::read(fixture("models/llama_tied/golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&text).unwrap();
    let list = |key: &str| {
        let list = golden["prompts"][prompt][key].as_array().unwrap();
        list.iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    (list("prompt"), list("greedy"))
}

pub fn ids(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

pub fn keys(object: &Value) -> Vec<&str> {
    object.as_object().unwrap().keys().map(String::as_str).collect()
}

pub fn has(object: &Value, fields: &[&str]) {
    for field in fields {
        assert!(object.get(field).is_some(), "{field} is not in {:?}", keys(object));
    }
}
