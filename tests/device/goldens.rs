//! Whole models against Hugging Face transformers: logits, layer outputs and greedy paths, on the device and on the host.
//!
//! The tolerance is absolute: a wrong constant or connection changes logits by at least 0.04, another order of summation by at
//! most 1e-4.

use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::lm::run::{Cancel, Finish, Generation, Session};
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind};
use cmf_gpu::sampling::Sampling;
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::Place;
use crate::golden::{Recorded, Row};

const TOLERANCE: f32 = 1e-3;
/// Tokens of every greedy path.
const STEPS: usize = 32;

/// A golden model, converted to f16, which holds its weights exactly.
pub struct Golden {
    name: &'static str,
    pub tensors: Arc<CmfContainer>,
    _dir: tempfile::TempDir,
}

impl Golden {
    fn open(name: &'static str) -> Golden {
        Golden::of(name, crate::golden(name, Dtype::F16))
    }

    /// A file that computes what was recorded for `name`.
    pub fn of(name: &'static str, (tensors, guard): (Arc<CmfContainer>, tempfile::TempDir)) -> Golden {
        Golden {
            name,
            tensors,
            _dir: guard,
        }
    }

    pub fn plan(&self, chunk: u32, max_binding: u64) -> Plan {
        let options = LowerOptions {
            chunk,
            max_binding,
            all_logits: true,
            ..crate::options(96)
        };
        crate::plan_of(&self.tensors, &options)
    }

    pub fn device(&self, chunk: u32) -> Session {
        let plan = self.plan(chunk, crate::device().max_binding());
        crate::session(Place::Device, &plan, self.tensors.clone())
    }

    pub fn host(&self, chunk: u32) -> Session {
        crate::session(Place::Host, &self.plan(chunk, 1 << 30), self.tensors.clone())
    }

    /// Compares a session with everything that is recorded.
    pub fn check(&self, session: &mut Session) {
        let recorded = Recorded::of(self.name);
        let rows = |name: &str| recorded.rows(name);
        let json = crate::golden::described(self.name);
        for (p, prompt) in json["prompts"].as_array().unwrap().iter().enumerate() {
            let ids = |key: &str| -> Vec<u32> {
                let ids = prompt[key].as_array().unwrap().iter();
                ids.map(|id| id.as_u64().unwrap() as u32).collect()
            };
            let (tokens, greedy) = (ids("prompt"), ids("greedy"));
            assert_eq!((greedy.len(), tokens.len()), (STEPS, [1, 7, 40][p]));

            let wanted = rows(&format!("logits.p{p}"));
            let (logits, hidden) = teacher_forced(session, &tokens, tokens.len());
            close(&format!("logits of prompt {p}"), &logits, &wanted);
            if p == 2 {
                let layers = session.plan().program(ProgramKind::Decode).taps.len();
                assert_eq!(hidden[0].len(), layers);
                for layer in 0..layers {
                    let found: Vec<_> = hidden.iter().map(|token| token[layer].clone()).collect();
                    close(
                        &format!("layer {layer}"),
                        &found,
                        &rows(&format!("hidden.p2.layer{layer}")),
                    );
                }
            }
            // Half in a prefill, half token by token.
            let (logits, hidden_by_step) = teacher_forced(session, &tokens, tokens.len() / 2);
            close(&format!("stepped logits of prompt {p}"), &logits, &wanted);
            for (found, wanted) in hidden_by_step.iter().zip(&hidden) {
                let exact = |values: &Vec<f32>| Row {
                    values: values.clone(),
                    slack: 0.0,
                };
                let wanted: Vec<_> = wanted.iter().map(exact).collect();
                close(&format!("stepped layers of prompt {p}"), found, &wanted);
            }

            // The logits that each greedy token was taken from: the path as a prompt.
            let path = [&tokens[..], &greedy[..STEPS - 1]].concat();
            let (logits, _) = teacher_forced(session, &path, tokens.len());
            let wanted = rows(&format!("greedy.p{p}.logits"));
            close(
                &format!("greedy logits of prompt {p}"),
                &logits[tokens.len() - 1..],
                &wanted,
            );

            session.clear();
            assert!(session.prefill(&tokens, &Cancel::new()).unwrap().1.is_continue());
            let mut found = Vec::new();
            let generation = Generation {
                sampling: Sampling::greedy(),
                stops: Vec::new(),
                max_tokens: STEPS,
            };
            let finish = session.generate(&generation, &Cancel::new(), &mut |token| {
                found.push(token);
                ControlFlow::Continue(())
            });
            assert_eq!(finish.unwrap(), Finish::Length);
            assert_eq!(found, greedy, "greedy path of prompt {p}");
        }
    }
}

/// Logits and layer outputs of every position, the first `prefill` in chunks, the others one by one.
fn teacher_forced(session: &mut Session, tokens: &[u32], prefill: usize) -> (Vec<Vec<f32>>, Vec<Vec<Vec<f32>>>) {
    let (mut logits, mut hidden) = (Vec::new(), Vec::new());
    session
        .logits(tokens, prefill, true, &mut |at, row, layers| {
            assert_eq!(at, logits.len());
            logits.push(row.to_vec());
            hidden.push(layers.to_vec());
            Ok(())
        })
        .unwrap();
    (logits, hidden)
}

fn close(what: &str, found: &[Vec<f32>], wanted: &[Row]) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (i, (found, Row { values, slack })) in found.iter().zip(wanted).enumerate() {
        assert_eq!(found.len(), values.len(), "{what}");
        for (k, (f, w)) in found.iter().zip(values).enumerate() {
            // A NaN is not close to anything.
            let close = (f - w).abs() <= TOLERANCE - slack;
            assert!(close, "{what}, row {i}, element {k}: expected {w}, found {f}");
        }
    }
}

macro_rules! models {
    ($($name:ident)*) => {
        mod device {
            // A chunk that neither prompt fills evenly.
            $(#[test] fn $name() {
                let golden = super::Golden::open(stringify!($name));
                golden.check(&mut golden.device(16));
            })*
        }
        mod host {
            $(#[test] fn $name() {
                let golden = super::Golden::open(stringify!($name));
                golden.check(&mut golden.host(64));
            })*
        }
    };
}
models!(llama_tied llama_untied llama3_rope llama_bias qwen2 qwen3 qwen3_yarn qwen3_mtp mistral_swa gemma2 gemma3 phi3 phi3_longrope
    qwen3_5 qwen3_5_hub qwen2_moe qwen3_moe qwen3_next qwen3_5_moe qwen3_5_moe_hub);
