//! Two devices side by side: of every kernel case whether both give the same bits, and of a model whether both give the
//! same greedy tokens.
//!
//! `cargo run --release --example compare_devices -- FIRST SECOND MODEL`, with two adapters' numbers or parts of their
//! names. Ends with 1 when a kernel without exp and tanh differs in a bit, or when a token differs. Drivers that fuse
//! `fma` differ from those that do not: this is a comparison of two that treat it alike.

use cmf_gpu::engine::{Engine, open_device};
use cmf_gpu::gpu::Device;
use cmf_gpu::options::{AnswerOptions, DeviceChoice, LoadOptions};
use cmf_gpu::parity::{self, Case};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::Cancel;
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

/// Kernels with exp or tanh, of which drivers promise no last bit. All others multiply, add, divide, take square roots or
/// move numbers.
const INEXACT: [&str; 18] = [
    "attn_block",
    "attn_block_some",
    "attn_chunk",
    "attn_chunk_some",
    "attn_merge",
    "attn_merge_some",
    "cap",
    "delta_net",
    "glu",
    "matmul_glu",
    "matmul_glu_some",
    "matvec_glu",
    "matvec_glu_some",
    "moe_glu",
    "moe_matmul_glu",
    "moe_matmul_up",
    "moe_matvec",
    "moe_route",
];

/// How the cases of one kernel and type came out.
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
    Ok(LoadOptions {
        device: device.parse::<DeviceChoice>()?,
        ctx: Some(256),
        ..LoadOptions::default()
    })
}

fn open(device: &str) -> Result<Arc<Device>, Box<dyn Error>> {
    let (device, _) = open_device(&options(device)?)?;
    Ok(device.ok_or("the CPU reference is no adapter")?)
}

fn kernels(devices: &[Arc<Device>; 2]) -> Result<BTreeMap<String, Tally>, Box<dyn Error>> {
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    // One way to cut weights for both.
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
    let answer = AnswerOptions {
        sampling: Some(Sampling::greedy()),
        max_tokens: Some(TOKENS),
        ..AnswerOptions::default()
    };
    let messages = [serde_json::json!({"role": "user", "content": prompt})];
    let answer = engine.chat(&messages, &answer, &Cancel::new(), &mut |_| ControlFlow::Continue(()))?;
    Ok(answer.tokens)
}
