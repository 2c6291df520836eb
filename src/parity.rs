//! Is the device right? The same steps on the device and with the reference kernels, and what differs.
//!
//! Two rings: [`kernels`] judges every kernel with every weight type on made-up numbers, [`programs`] every step of a
//! model's programs. (The third ring, recorded logits of whole models, is in the tests.) Outputs start as NaN with a fence
//! behind them, so that what was not written, or written elsewhere, shows.

mod cases;
mod programs;
mod rig;

pub use cases::cases;
pub use programs::programs;
pub use rig::{Rig, Round};

use crate::container::Tensors;
use crate::error::Result;
use crate::gpu::{Device, GpuExecutor};
use crate::host::HostExecutor;
use crate::kernel::Kv;
use crate::program::{BufferId, Executor, Plan, Step, Which};
use half::f16;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// How far a device may be from the reference: relative L2, over the elements a step writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tolerance {
    /// To the bit.
    Exact,
    /// A few roundings an element: 1e-6.
    Rounded,
    /// A sum in f32: 5e-6.
    Summed,
    /// Through exp or tanh, of which drivers promise less: 2e-5.
    Exponential,
    /// Rounded to f16, where a last bit of f32 may decide: 1e-3.
    Half,
}

impl Tolerance {
    /// The largest error that passes.
    pub fn limit(self) -> f64 {
        match self {
            Tolerance::Exact => 0.0,
            Tolerance::Rounded => 1e-6,
            Tolerance::Summed => 5e-6,
            Tolerance::Exponential => 2e-5,
            Tolerance::Half => 1e-3,
        }
    }
}

/// What was judged, and how it went.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Comparisons.
    pub cases: usize,
    /// Those within tolerance.
    pub passed: usize,
    /// The others, each name once with its first difference.
    pub failed: Vec<Failure>,
    /// The largest error of every kind of comparison, by name.
    pub worst: Vec<(String, f64)>,
}

/// A comparison that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its name: kernel, type and dimensions, or program and step.
    pub name: String,
    /// What was wrong.
    pub what: String,
}

/// A plan with its weights.
#[derive(Clone)]
pub struct Subject {
    /// The plan.
    pub plan: Arc<Plan>,
    /// What its matrices and vectors are made of.
    pub tensors: Arc<dyn Tensors>,
}

/// One line of the table: a kernel with a weight type and dimensions.
#[derive(Clone, Debug)]
pub struct Case {
    name: String,
    tolerance: Tolerance,
    spec: cases::Spec,
    seed: u64,
}

impl Case {
    /// The unique name: kernel and type, dimensions, flags.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kernel and type of the name.
    pub fn kind(&self) -> &str {
        self.name.split(' ').next().unwrap_or_default()
    }

    /// How far the device may be off.
    pub fn tolerance(&self) -> Tolerance {
        self.tolerance
    }

    /// The case's plan and rounds for a device that binds `max_binding` bytes at once.
    pub fn rig(&self, max_binding: u64) -> Result<Rig> {
        let rig = self.spec.rig(self.seed, max_binding);
        rig.map_err(|err| err.context(&self.name))
    }
}

/// What differs between the device and the reference, or that nothing does but by the error given.
type Verdict = Result<f64, Difference>;

/// Why a comparison fails.
#[derive(Clone, Debug, PartialEq)]
enum Difference {
    /// The relative error and the largest that passes.
    TooFar(f64, f64),
    /// A device's value is not a finite number.
    NonFinite(usize),
    /// The reference's value is not a finite number: the case is no good.
    BadReference(usize),
    /// A word was written that the step does not own, or was left that it does.
    Stray(usize),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::TooFar(error, limit) => write!(f, "relative error {error:.2e}, wanted at most {limit:.0e}"),
            Difference::NonFinite(i) => write!(f, "element {i} is not a finite number"),
            Difference::BadReference(i) => write!(f, "the reference's element {i} is not a finite number"),
            Difference::Stray(i) => write!(f, "word {i} was written or left against the reference"),
        }
    }
}

/// What the words of a buffer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Elements {
    F32,
    F16,
    /// Compared to the bit.
    Words,
    /// Pairs of a word and a number.
    Pairs,
}

/// What a step's output is made of, by the binding's name in the catalogue.
fn elements(binding: &str, kv: Kv) -> Elements {
    match (binding, kv) {
        ("counts" | "ctl" | "draft" | "lists", _) => Elements::Words,
        ("router" | "routes", _) => Elements::Pairs,
        ("k_cache" | "v_cache", Kv::F16) => Elements::F16,
        _ => Elements::F32,
    }
}

/// Judges the words a device left in a buffer that held `before` and where the reference left `wanted`.
fn judge(before: &[u32], found: &[u32], wanted: &[u32], elements: Elements, tolerance: Tolerance) -> Verdict {
    let tolerance = match elements {
        Elements::F32 | Elements::Pairs => tolerance,
        Elements::F16 => Tolerance::Half,
        Elements::Words => Tolerance::Exact,
    };
    let (mut difference, mut norm) = (0.0, 0.0);
    for (i, ((&before, &found), &wanted)) in before.iter().zip(found).zip(wanted).enumerate() {
        if before == wanted && before == found {
            continue;
        }
        // A word that only one side left at the NaN it began with.
        if before == rig::UNSET && (found == before || wanted == before) {
            return Err(Difference::Stray(i));
        }
        let pairs = match elements {
            Elements::Pairs if i % 2 == 0 && found == wanted => [None, None],
            Elements::Pairs if i % 2 == 0 => return Err(Difference::Stray(i)),
            Elements::F32 | Elements::Pairs => [Some((f32::from_bits(found), f32::from_bits(wanted))), None],
            Elements::F16 => [0, 16].map(|shift| {
                let half = |word: u32| f16::from_bits((word >> shift) as u16).to_f32();
                Some((half(found), half(wanted)))
            }),
            Elements::Words if found == wanted => [None, None],
            Elements::Words => return Err(Difference::Stray(i)),
        };
        for (found, wanted) in pairs.into_iter().flatten() {
            if !wanted.is_finite() {
                return Err(Difference::BadReference(i));
            }
            if !found.is_finite() {
                return Err(Difference::NonFinite(i));
            }
            difference += (f64::from(found) - f64::from(wanted)).powi(2);
            norm += f64::from(wanted).powi(2);
        }
    }
    let error = match (difference, norm) {
        (0.0, _) => 0.0,
        (_, 0.0) => f64::INFINITY,
        _ => (difference / norm).sqrt(),
    };
    match error <= tolerance.limit() {
        true => Ok(error),
        false => Err(Difference::TooFar(error, tolerance.limit())),
    }
}

/// Runs every case whose name contains `filter` on the device and on the host. `progress` is told cases done, cases in all
/// and the name of the next.
///
/// Errors: those of the executors; a wrong result is no error but in the outcome.
pub fn kernels(
    device: &Arc<Device>,
    filter: Option<&str>,
    progress: &mut dyn FnMut(usize, usize, &str) -> Result<()>,
) -> Result<Outcome> {
    let mut all = cases();
    all.retain(|case| filter.is_none_or(|filter| case.name.contains(filter)));
    let mut tally = Tally::default();
    for (i, case) in all.iter().enumerate() {
        progress(i, all.len(), &case.name)?;
        let rig = case.rig(device.max_binding())?;
        let result = compare(device, &rig, &rig, case.tolerance).map_err(|err| err.context(&case.name))?;
        tally.add(case.kind(), &case.name, result);
    }
    Ok(tally.outcome())
}

/// Runs `tried` on the device and `reference` on the host, which are one rig unless a test wants a mistake to be found:
/// the largest error, or the first difference in words.
pub fn compare(
    device: &Arc<Device>,
    tried: &Rig,
    reference: &Rig,
    tolerance: Tolerance,
) -> Result<Result<f64, String>> {
    let mut gpu = gpu(device, tried)?;
    let mut host = HostExecutor::new(Arc::new(reference.plan.clone()), reference.tensors.clone())?;
    let plan = &reference.plan;
    let written = written(plan);
    let mut worst: f64 = 0.0;
    let mut idle = true;
    for round in &reference.rounds {
        run(reference, round, &mut host)?;
        run(tried, round, &mut gpu)?;
        for buffer in 0..plan.buffers.len() {
            let before = reference.contents(round, buffer);
            let found = gpu.read(buffer, 0, before.len())?;
            let verdict = match written.get(&buffer) {
                Some(name) => {
                    let wanted = host.read(buffer, 0, before.len())?;
                    idle &= wanted == before;
                    judge(&before, &found, &wanted, elements(name, plan.kv), tolerance)
                }
                // An input, which is as it was.
                None => judge(&before, &found, &before, Elements::Words, Tolerance::Exact),
            };
            match verdict {
                Ok(error) => worst = worst.max(error),
                Err(what) => {
                    let label = &plan.buffers[buffer].label;
                    return Ok(Err(format!("{}: {label}: {what}", round.name)));
                }
            }
        }
    }
    match idle {
        true => Ok(Err("the reference writes nothing".into())),
        false => Ok(Ok(worst)),
    }
}

/// What the device leaves in every buffer after every round: for comparing devices and variants bit by bit.
pub fn outputs(device: &Arc<Device>, rig: &Rig) -> Result<Vec<Vec<u32>>> {
    let mut gpu = gpu(device, rig)?;
    let mut all = Vec::new();
    for round in &rig.rounds {
        run(rig, round, &mut gpu)?;
        for &buffer in written(&rig.plan).keys() {
            all.push(gpu.read(buffer, 0, rig.plan.buffers[buffer].bytes as usize / 4)?);
        }
    }
    Ok(all)
}

fn gpu(device: &Arc<Device>, rig: &Rig) -> Result<GpuExecutor> {
    GpuExecutor::new(
        device.clone(),
        Arc::new(rig.plan.clone()),
        &*rig.tensors,
        &mut |_, _| Ok(()),
    )
}

/// The buffers that the steps of a rig write, each with the binding's name.
fn written(plan: &Plan) -> BTreeMap<BufferId, &'static str> {
    let steps = plan.program(Which::Decode).steps.iter();
    steps
        .flat_map(Step::writes)
        .map(|(name, buffer)| (buffer, name))
        .collect()
}

fn run(rig: &Rig, round: &Round, executor: &mut dyn Executor) -> Result<()> {
    for buffer in 0..rig.plan.buffers.len() {
        executor.write(buffer, &rig.contents(round, buffer))?;
    }
    let steps = rig.plan.program(Which::Decode).steps.len();
    executor.run(Which::Decode, 0..steps, round.extent)
}

/// An outcome being counted.
#[derive(Default)]
struct Tally {
    cases: usize,
    passed: usize,
    failed: Vec<Failure>,
    worst: BTreeMap<String, f64>,
}

impl Tally {
    fn add(&mut self, kind: &str, name: &str, result: Result<f64, String>) {
        self.cases += 1;
        match result {
            Ok(error) => {
                self.passed += 1;
                let worst = self.worst.entry(kind.into()).or_insert(0.0);
                *worst = worst.max(error);
            }
            Err(_) if self.failed.iter().any(|failure| failure.name == name) => {}
            Err(what) => self.failed.push(Failure {
                name: name.into(),
                what,
            }),
        }
    }

    fn outcome(self) -> Outcome {
        Outcome {
            cases: self.cases,
            passed: self.passed,
            failed: self.failed,
            worst: self.worst.into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn errors_are_relative_to_what_is_written() {
        let before = bits(&[1e6, 0.0, 0.0]);
        let wanted = bits(&[1e6, 3.0, 4.0]);
        let found = bits(&[1e6, 3.0, 4.001]);
        let judged = judge(&before, &found, &wanted, Elements::F32, Tolerance::Summed);
        // The large element that nobody touched does not make the error look small.
        assert!(
            matches!(judged, Err(Difference::TooFar(error, _)) if (error - 2e-4).abs() < 1e-6),
            "{judged:?}"
        );
        assert_eq!(
            judge(&before, &wanted, &wanted, Elements::F32, Tolerance::Exact),
            Ok(0.0)
        );
        assert!(
            judge(
                &before,
                &bits(&[1e6, 0.0, 1e-9]),
                &before,
                Elements::F32,
                Tolerance::Half
            )
            .is_err()
        );
    }

    #[test]
    fn what_is_not_written_or_written_elsewhere_shows() {
        let unset = [rig::UNSET; 2];
        let one = [1f32.to_bits(), rig::UNSET];
        let both = bits(&[1.0, 1.0]);
        let judged = |found: &[u32], wanted: &[u32]| judge(&unset, found, wanted, Elements::F32, Tolerance::Half);
        assert_eq!(judged(&one, &one), Ok(0.0));
        assert_eq!(judged(&one, &both), Err(Difference::Stray(1)));
        assert_eq!(judged(&both, &one), Err(Difference::Stray(1)));
    }

    #[test]
    fn what_is_not_finite_fails() {
        let (nan, one) = (bits(&[f32::NAN]), bits(&[1.0]));
        let judged = |found: &[u32], wanted: &[u32]| judge(&[0], found, wanted, Elements::F32, Tolerance::Half);
        assert_eq!(judged(&nan, &one), Err(Difference::NonFinite(0)));
        assert_eq!(judged(&one, &nan), Err(Difference::BadReference(0)));
        assert_eq!(judged(&bits(&[f32::INFINITY]), &one), Err(Difference::NonFinite(0)));
    }

    #[test]
    fn halves_and_words_are_compared_as_what_they_are() {
        let half = |value: f32| u32::from(f16::from_f32(value).to_bits());
        let pair = |low: f32, high: f32| [half(low) | half(high) << 16];
        let judged = |found: &[u32], elements| judge(&[0], found, &pair(1.0, 2.0), elements, Tolerance::Summed);
        assert_eq!(judged(&pair(1.0, 2.0), Elements::F16), Ok(0.0));
        assert!(judged(&pair(1.01, 2.0), Elements::F16).is_err());
        assert!(judged(&pair(1.0, 2.02), Elements::F16).is_err());
        assert_eq!(
            judged(&[half(1.0) | half(2.0) << 16 ^ 1], Elements::Words),
            Err(Difference::Stray(0))
        );
    }

    #[test]
    fn names_are_unique_and_every_kernel_has_cases() {
        let cases = cases();
        let mut names: Vec<_> = cases.iter().map(Case::name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), cases.len());
        for kernel in crate::kernel::Kernel::ALL {
            let stem = kernel.stem();
            let has = cases.iter().any(|case| case.kind().split('.').next() == Some(stem));
            assert!(has, "{stem} has no case");
        }
    }
}
