//! Compares two devices: the bits of every kernel case, and the greedy tokens of a model.
//!
//! `cargo run --release --example compare_devices -- FIRST SECOND MODEL`, with the indices of two adapters or parts of their
//! names. The exit code is 1 if a kernel without exp and tanh differs in a bit, or if a token differs. Both drivers must
//! treat `fma` alike: a driver that fuses it gives other bits than one that does not.

use cmf_gpu::engine::open_device;
use cmf_gpu::options::{DeviceChoice, Sampling};
use cmf_gpu::parity::{self, Case};
use cmf_gpu::{AnswerOptions, Cancel, Device, Engine, LoadOptions, Message};
use std::collections::BTreeMap;
use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

const PROMPTS: [&str; 3] = [
    "What is the capital of France?",
    "Write three sentences about the sea.",
    "Explain why the sky is blue.",
];
const TOKENS: usize = 32;

/// Kernels with exp or tanh, whose last bits depend on the driver. The other kernels multiply, add, divide, take square
/// roots or move numbers.
const INEXACT: [&str; 13] = [
    "attn_block",
    "attn_chunk",
    "attn_merge",
    "cap",
    "delta_net",
    "glu",
    "matmul_glu",
    "matvec_glu",
    "moe_glu",
    "moe_matmul_glu",
    "moe_matmul_up",
    "moe_matvec",
    "moe_route",
];

/// The results of the cases of one kernel and type.
#[derive(Default)]
struct Tally {
    cases: usize,
    equal: usize,
    words: usize,
    different_words: usize,
    /// The first case that differs.
    first: Option<String>,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, first, second, model] = arguments.as_slice() else {
        return Err("usage: compare_devices FIRST SECOND MODEL".into());
    };
    let devices = [open(first)?, open(second)?];
    println!("A: {} ({:?})", devices[0].name, devices[0].team());
    println!("B: {} ({:?})", devices[1].name, devices[1].team());

    let kernels = kernels(&devices)?;
    println!("\n| kernel and type | cases | same bits | words that differ | first case that differs |");
    println!("|---|---:|---:|---:|---|");
    let mut good = true;
    for (kind, tally) in &kernels {
        let first = tally.first.as_deref().unwrap_or("");
        let share = 100.0 * tally.different_words as f64 / tally.words as f64;
        println!(
            "| {kind} | {} | {} | {share:.2} % | {first} |",
            tally.cases, tally.equal
        );
        let stem = kind.split('.').next().unwrap_or_default();
        good &= INEXACT.contains(&stem) || tally.equal == tally.cases;
    }
    let (cases, equal) = kernels
        .values()
        .fold((0, 0), |sum, tally| (sum.0 + tally.cases, sum.1 + tally.equal));
    println!("\n{equal} of {cases} cases give the same bits");

    for prompt in PROMPTS {
        let answers = [first, second].map(|device| greedy(device, Path::new(model), prompt));
        let [a, b] = answers;
        let (a, b) = (a?, b?);
        let same = a == b;
        println!(
            "greedy, {TOKENS} tokens, {prompt:?}: {}",
            if same { "same" } else { "DIFFERENT" }
        );
        if !same {
            println!("  A: {a:?}\n  B: {b:?}");
        }
        good &= same;
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn options(device: &str) -> Result<LoadOptions, Box<dyn Error>> {
    Ok(LoadOptions::default().device(device.parse::<DeviceChoice>()?).ctx(256))
}

fn open(device: &str) -> Result<Arc<Device>, Box<dyn Error>> {
    let (device, _) = open_device(&options(device)?)?;
    Ok(device.ok_or("the CPU reference is no adapter")?)
}

fn kernels(devices: &[Arc<Device>; 2]) -> Result<BTreeMap<String, Tally>, Box<dyn Error>> {
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    // The same split of weights into bindings on both.
    let binding = devices[0].max_binding().min(devices[1].max_binding());
    for case in parity::cases() {
        let rig = case.rig(binding)?;
        let a = parity::outputs(&devices[0], &rig)?;
        let b = parity::outputs(&devices[1], &rig)?;
        tallies.entry(case.kind().into()).or_default().add(&case, &a, &b);
    }
    Ok(tallies)
}

impl Tally {
    fn add(&mut self, case: &Case, a: &[Vec<u32>], b: &[Vec<u32>]) {
        let pairs = || a.iter().zip(b).flat_map(|(a, b)| a.iter().zip(b));
        let different = pairs().filter(|(a, b)| a != b).count();
        self.cases += 1;
        self.words += pairs().count();
        self.different_words += different;
        match different {
            0 => self.equal += 1,
            _ => self.first = self.first.take().or_else(|| Some(case.name().into())),
        }
    }
}

fn greedy(device: &str, model: &Path, prompt: &str) -> Result<Vec<u32>, Box<dyn Error>> {
    let mut engine = Engine::load(model, &options(device)?, &mut |_, _| ControlFlow::Continue(()))?;
    let answer = AnswerOptions::default().sampling(Sampling::greedy()).max_tokens(TOKENS);
    let answer = engine.chat(&[Message::user(prompt)], &answer, &Cancel::new(), &mut |_| {
        ControlFlow::Continue(())
    })?;
    Ok(answer.tokens)
}
