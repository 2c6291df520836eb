//! Answers: tokens, text, and why they end.

use crate::permutation::{END, FIRST, PROMPT, Permutation, devices, greedy, load, two_ways};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::engine::{Answer, Engine};
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::lm::run::{Cancel, Finish};
use cmf_gpu::options::{AnswerOptions, DeviceChoice, LoadOptions};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::{Kind, Result};
use std::ops::ControlFlow;

/// The answer to the prompt, and its streamed text.
fn answer(engine: &mut Engine, options: &AnswerOptions) -> (Answer, String) {
    let mut streamed = String::new();
    let answer = engine.continue_tokens(&[PROMPT], options, &Cancel::new(), &mut |text| {
        streamed.push_str(text);
        ControlFlow::Continue(())
    });
    (answer.unwrap(), streamed)
}

const RUNNABLE: [Dtype; 8] = [
    Dtype::F32,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::Q8Row,
    Dtype::Q82f,
    Dtype::Q4Block,
    Dtype::Q4Tiled,
    Dtype::Q4tp,
];

/// Guards against a weight type or a device that gives other tokens than the rest.
#[test]
fn every_type_walks_the_same_path_on_every_device() {
    for device in devices() {
        for dtype in RUNNABLE {
            let model = Permutation::walking(dtype);
            let mut engine = model.on(device.clone());
            let (answer, _) = answer(&mut engine, &greedy(70, &[]));
            // A context of 64 holds the prompt token and 63 more; the last token is not evaluated.
            assert_eq!(answer.finish, Finish::Context);
            assert_eq!(answer.tokens, model.path(PROMPT, 64), "{} on {device:?}", dtype.name());
        }
    }
}

/// Guards against a prefill of several tokens that differs from decoding them one by one.
#[test]
fn a_prompt_ends_in_the_successor_of_its_last_token() {
    for device in devices() {
        let model = Permutation::walking(Dtype::Q8Row);
        let (_dir, path) = model.file();
        let mut engine = load(&path, device, 256);
        for len in [1, 2, 7, 63, 64, 65, 129, 255] {
            let prompt = model.path(PROMPT, len);
            let reply = engine
                .continue_tokens(&prompt, &greedy(2, &[]), &Cancel::new(), &mut |_| {
                    ControlFlow::Continue(())
                })
                .unwrap();
            let last = prompt[len - 1];
            assert_eq!(reply.tokens, model.path(last, reply.tokens.len()), "{len}");
            engine.session().clear();
        }
    }
}

/// Guards against choosing a padding row of the vocabulary when all logits are negative.
#[test]
fn no_token_beyond_the_vocabulary_is_ever_chosen() {
    for device in devices() {
        let mut model = Permutation::answering(&[]);
        model.next = (1..50).chain([2]).collect();
        model.texts.truncate(50);
        model.logits = [-1.0, -4.0];
        let mut engine = model.on(device);
        let (greedy, _) = answer(&mut engine, &greedy(40, &[]));
        assert_eq!(greedy.tokens, model.path(PROMPT, 40));
        let hot = AnswerOptions::default()
            .sampling(Sampling {
                temperature: 100.0,
                top_k: 0,
                top_p: 1.0,
                ..Sampling::default()
            })
            .max_tokens(60);
        let (hot, _) = answer(&mut engine, &hot);
        assert!(hot.tokens.iter().all(|&token| token < 50), "{:?}", hot.tokens);
    }
}

/// Guards against hanging, or printing the token, when the first token ends the answer.
#[test]
fn an_empty_answer_is_an_answer() {
    for device in devices() {
        let mut engine = Permutation::answering(&[]).on(device);
        let (answer, streamed) = answer(&mut engine, &greedy(8, &[]));
        assert_eq!((answer.finish, answer.tokens), (Finish::Stop, vec![END]));
        assert_eq!((answer.text.as_str(), streamed.as_str()), ("", ""));
    }
}

/// Guards against short answers that are never streamed, and against answers beyond the token limit.
#[test]
fn answers_end_where_they_should() {
    let mut engine = Permutation::answering(&[b"ok"]).on(DeviceChoice::Cpu);
    let (short, streamed) = answer(&mut engine, &greedy(8, &[]));
    assert_eq!(
        (short.finish, short.text.as_str(), streamed.as_str()),
        (Finish::Stop, "ok", "ok")
    );
    assert_eq!(short.tokens, [FIRST, END]);
    for device in devices() {
        let mut engine = Permutation::repeating(&[b"ab", b"c"]).on(device);
        for max in [0, 1, 2, 9] {
            let (reply, streamed) = answer(&mut engine, &greedy(max, &[]));
            assert_eq!((reply.finish, reply.tokens.len()), (Finish::Length, max));
            let whole = "abc".repeat(5);
            let wanted: usize = (0..max).map(|i| 2 - i % 2).sum();
            assert_eq!(
                (reply.text.as_str(), streamed.as_str()),
                (&whole[..wanted], &whole[..wanted])
            );
        }
    }
}

/// Guards against printing a stop text that spans several tokens, or losing the text before it.
#[test]
fn stop_texts_across_tokens_end_the_answer() {
    let pieces: [&[u8]; 6] = [b"one E", b"N", b"Dx EN", b"DING", b"after", b" more"];
    let mut engine = Permutation::answering(&pieces).on(DeviceChoice::Cpu);
    for (stop, wanted) in [
        (&["ENDING"][..], "one ENDx "),
        (&["END"], "one "),
        (&["NDx"], "one E"),
        // If one token contains two stop texts, the one that starts first counts.
        (&["D", "ENDx"], "one "),
        (&["G", "more"], "one ENDx ENDIN"),
        (&["one"], ""),
        (&["never"], "one ENDx ENDINGafter more"),
        // The text that could have become the stop text is printed in the end.
        (&["more than this"], "one ENDx ENDINGafter more"),
    ] {
        let (answer, streamed) = answer(&mut engine, &greedy(20, stop));
        assert_eq!((answer.text.as_str(), streamed.as_str()), (wanted, wanted), "{stop:?}");
        assert_eq!(answer.finish, Finish::Stop);
    }
}

/// Guards against characters that span several tokens being printed as U+FFFD, and against errors at a token limit
/// within one.
#[test]
fn characters_across_tokens_are_printed_whole() {
    let pieces: [&[u8]; 6] = [
        b"a\xf0",
        b"\x9f",
        b"\x98\x80",
        b"\xc3",
        b"\xa9",
        "世\u{1f600}".as_bytes(),
    ];
    let mut engine = Permutation::answering(&pieces).on(DeviceChoice::Cpu);
    let (whole, streamed) = answer(&mut engine, &greedy(20, &[]));
    let wanted = "a\u{1f600}é世\u{1f600}";
    assert_eq!((whole.text.as_str(), streamed.as_str()), (wanted, wanted));
    let (cut, streamed) = answer(&mut engine, &greedy(2, &[]));
    assert_eq!(
        (cut.finish, cut.text.as_str(), streamed.as_str()),
        (Finish::Length, "a\u{fffd}", "a\u{fffd}")
    );
}

/// Guards against control tokens in the text, and against control tokens that end an answer without being stop tokens.
#[test]
fn special_tokens_are_no_text_and_do_not_end_an_answer() {
    let mut model = Permutation::answering(&[b"x", b"<|fim_middle|>", b"y"]);
    model.special.push(FIRST + 1);
    let (answer, _) = answer(&mut model.on(DeviceChoice::Cpu), &greedy(20, &[]));
    assert_eq!((answer.text.as_str(), answer.tokens.len()), ("xy", 4));
}

/// Guards against endless answers of a file without an end-of-turn id.
#[test]
fn well_known_ends_of_turn_are_found() {
    let mut model = Permutation::answering(&[b"x", b"<|im_end|>", b"y"]);
    model.special.push(FIRST + 1);
    model.eos.clear();
    let (reply, _) = answer(&mut model.on(DeviceChoice::Cpu), &greedy(20, &[]));
    assert_eq!((reply.text.as_str(), reply.finish), ("x", Finish::Stop));
    // An ordinary token with the same text does not end the answer.
    model.special.pop();
    let (reply, _) = answer(&mut model.on(DeviceChoice::Cpu), &greedy(3, &[]));
    assert_eq!(reply.text, "x<|im_end|>y");
}

/// Guards against ignoring some of many stop tokens.
#[test]
fn every_stop_token_of_a_file_ends_an_answer() {
    for device in devices() {
        let mut model = Permutation::repeating(&[b"x"]);
        // More stop tokens than the device checks; the model gives the highest one.
        model.eos = (30..60).collect();
        model.next[FIRST as usize] = 59;
        let mut engine = model.on(device);
        let (reply, _) = answer(&mut engine, &greedy(20, &[]));
        assert_eq!(
            (reply.finish, reply.tokens.as_slice()),
            (Finish::Stop, &[FIRST, 59][..])
        );
        assert_eq!(reply.text, "x");
    }
}

/// Guards against an answer that the caller ends being reported as finished.
#[test]
fn an_answer_that_the_callback_ends_is_interrupted() {
    for device in devices() {
        let mut engine = Permutation::answering(&[b"a", b"b", b"c"]).on(device);
        let mut until = |last: &str, options: &AnswerOptions| {
            let answer = engine.continue_tokens(&[PROMPT], options, &Cancel::new(), &mut |text| match text == last {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            });
            let answer = answer.unwrap();
            (answer.text, answer.finish)
        };
        assert_eq!(until("b", &greedy(20, &[])), ("ab".into(), Finish::Interrupted));
        assert_eq!(until("never", &greedy(20, &[])), ("abc".into(), Finish::Stop));
        // A stop text ends the answer first.
        assert_eq!(until("a", &greedy(20, &["b"])), ("a".into(), Finish::Interrupted));
        assert_eq!(until("never", &greedy(20, &["b"])), ("a".into(), Finish::Stop));
    }
}

/// Guards against crashes, hangs and wrong answers for prompts that do not fit the context.
#[test]
fn prompts_as_long_as_the_context_and_longer() {
    for device in devices() {
        let model = Permutation::walking(Dtype::F16);
        let mut engine = model.on(device);
        let prompt = model.path(PROMPT, 65);
        let ask = |engine: &mut Engine, prompt: &[u32]| -> Result<Answer> {
            engine.continue_tokens(prompt, &greedy(9, &[]), &Cancel::new(), &mut |_| {
                ControlFlow::Continue(())
            })
        };
        let full = ask(&mut engine, &prompt[..64]).unwrap();
        assert_eq!((full.finish, full.tokens), (Finish::Context, model.path(prompt[63], 1)));
        let err = ask(&mut engine, &prompt).unwrap_err();
        assert_eq!(err.kind, Kind::ContextFull);
        assert!(err.message.contains("65") && err.message.contains("64"), "{err}");
        assert_eq!(ask(&mut engine, &[]).unwrap_err().kind, Kind::Usage);
        assert_eq!(ask(&mut engine, &[64]).unwrap_err().kind, Kind::Usage);
        // The engine still works after these errors.
        let after = ask(&mut engine, &prompt[..3]).unwrap();
        assert_eq!(after.tokens, model.path(prompt[2], 9));
    }
}

/// Guards against a cached prompt that panics or changes the result of a seed.
#[test]
fn a_cached_prompt_and_a_seed_give_the_same_answer_again() {
    for device in devices() {
        let mut model = Permutation::walking(Dtype::F16);
        // The logits are close, so that sampling decides.
        model.logits = [0.2, 0.0];
        let mut engine = model.on(device);
        let prompt = model.path(PROMPT, 20);
        let seeded = |seed| {
            AnswerOptions::default()
                .sampling(Sampling {
                    temperature: 1.0,
                    seed,
                    ..Sampling::default()
                })
                .max_tokens(30)
        };
        let mut ask = |seed| {
            let reply = engine.continue_tokens(&prompt, &seeded(seed), &Cancel::new(), &mut |_| {
                ControlFlow::Continue(())
            });
            reply.unwrap()
        };
        let (first, second, other) = (ask(5), ask(5), ask(6));
        assert_eq!((first.cached_tokens, second.cached_tokens), (0, 19));
        assert_eq!(first.tokens, second.tokens);
        assert_ne!(first.tokens, other.tokens);
    }
}

/// Guards against state shared between two models in one process.
#[test]
fn models_in_one_process_do_not_see_each_other() {
    let (a, b) = two_ways();
    for device in devices() {
        let [mut first, mut second] = [&a, &b].map(|model| model.on(device.clone()));
        let tokens = |engine: &mut Engine| answer(engine, &greedy(12, &[])).0.tokens;
        for _ in 0..3 {
            assert_eq!(tokens(&mut first), a.path(PROMPT, 12));
            assert_eq!(tokens(&mut second), b.path(PROMPT, 12));
        }
        drop(first);
        assert_eq!(tokens(&mut b.on(device.clone())), b.path(PROMPT, 12));
        assert_eq!(tokens(&mut second), b.path(PROMPT, 12));
        assert_eq!(tokens(&mut a.on(device.clone())), a.path(PROMPT, 12));
    }
}

/// Guards against deadlocks and mixed answers of engines in several threads.
#[test]
fn several_engines_run_at_once() {
    let models: Vec<Permutation> = (0..4)
        .map(|i| Permutation::walking([Dtype::F16, Dtype::Q4tp][i % 2]))
        .collect();
    std::thread::scope(|scope| {
        for (i, model) in models.iter().enumerate() {
            scope.spawn(move || {
                let mut engine = model.on(devices()[i / 2].clone());
                for _ in 0..3 {
                    assert_eq!(answer(&mut engine, &greedy(30, &[])).0.tokens, model.path(PROMPT, 30));
                }
            });
        }
    });
}

/// Guards against loading an overlay entry that lies outside its matrix.
#[test]
fn overlays_that_do_not_fit_are_refused_by_name_when_loading() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.cmf");
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/interop/qwen2-q1s.cmf");
    let mut file = std::fs::read(&fixture).unwrap();
    let data_off = u64::from_le_bytes(file[0x30..0x38].try_into().unwrap());
    let container = CmfContainer::open(&fixture).unwrap();
    let tensor = container.find("model.layers.1.mlp.up_proj.weight").unwrap();
    let info = &container.infos()[tensor];
    // The last entry: an index of 4 bytes and a value of 2 bytes.
    let end = (data_off + container.payloads()[tensor].offset + info.nbytes) as usize;
    let (rows, cols) = info.rows_cols();
    file[end - 6..end - 2].copy_from_slice(&((rows * cols) as u32).to_le_bytes());
    std::fs::write(&path, file).unwrap();
    for device in devices() {
        let options = LoadOptions::default().device(device);
        let err = Engine::load(&path, &options, &mut |_, _| ControlFlow::Continue(()))
            .err()
            .unwrap();
        assert_eq!(err.kind, Kind::Parse, "{err}");
        assert!(
            err.message.contains(&info.name) && err.message.contains("overlay entry"),
            "{err}"
        );
    }
}

/// Guards against overflow of a memory limit that is larger than any memory.
#[test]
fn a_huge_memory_limit_is_no_limit() {
    let (_dir, path) = Permutation::answering(&[b"x"]).file();
    for vram_mb in [1 << 44, u64::MAX] {
        let options = LoadOptions::default().device(DeviceChoice::Cpu).vram_mb(vram_mb);
        assert!(Engine::load(&path, &options, &mut |_, _| ControlFlow::Continue(())).is_ok());
    }
}
