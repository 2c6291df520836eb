//! Answers: their tokens, their text, and where they end.

use crate::permutation::{END, FIRST, PROMPT, Permutation, devices, greedy, load, two_ways};
use cmf_gpu::container::{Container, Tensors};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::engine::{Answer, Engine};
use cmf_gpu::options::{AnswerOptions, DeviceChoice, LoadOptions};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::{Cancel, Finish};
use cmf_gpu::{Kind, Result};
use std::ops::ControlFlow;

/// The answer to the prompt, and the text as it was streamed.
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

/// One type or one device is gibberish where all others are right.
#[test]
fn every_type_walks_the_same_path_on_every_device() {
    for device in devices() {
        for dtype in RUNNABLE {
            let model = Permutation::walking(dtype);
            let mut engine = model.on(device.clone());
            let (answer, _) = answer(&mut engine, &greedy(70, &[]));
            // The context of 64 holds the prompt and 63 tokens; the last one is not run.
            assert_eq!(answer.finish, Finish::Context);
            assert_eq!(answer.tokens, model.path(PROMPT, 64), "{} on {device:?}", dtype.name());
        }
    }
}

/// A prefill of many tokens that disagrees with the same tokens one by one.
#[test]
fn a_prompt_ends_in_the_successor_of_its_last_token() {
    for device in devices() {
        let model = Permutation::walking(Dtype::Q8Row);
        let (_dir, path) = model.file();
        let mut engine = load(&path, device, 256);
        for len in [1, 2, 7, 63, 64, 65, 129, 255] {
            let prompt = model.path(PROMPT, len);
            let told = engine
                .continue_tokens(&prompt, &greedy(2, &[]), &Cancel::new(), &mut |_| {
                    ControlFlow::Continue(())
                })
                .unwrap();
            let last = prompt[len - 1];
            assert_eq!(told.tokens, model.path(last, told.tokens.len()), "{len}");
            engine.session().clear();
        }
    }
}

/// Padding of the vocabulary wins where every logit is negative, and a token that does not exist comes out.
#[test]
fn no_token_beyond_the_vocabulary_is_ever_chosen() {
    for device in devices() {
        let mut model = Permutation::saying(&[]);
        model.next = (1..50).chain([2]).collect();
        model.texts.truncate(50);
        model.logits = [-1.0, -4.0];
        let mut engine = model.on(device);
        let (greedy, _) = answer(&mut engine, &greedy(40, &[]));
        assert_eq!(greedy.tokens, model.path(PROMPT, 40));
        let hot = AnswerOptions {
            sampling: Some(Sampling {
                temperature: 100.0,
                top_k: 0,
                top_p: 1.0,
                ..Sampling::default()
            }),
            max_tokens: Some(60),
            ..AnswerOptions::default()
        };
        let (hot, _) = answer(&mut engine, &hot);
        assert!(hot.tokens.iter().all(|&token| token < 50), "{:?}", hot.tokens);
    }
}

/// A model that ends its turn at once makes the program hang, or print the token.
#[test]
fn an_empty_answer_is_an_answer() {
    for device in devices() {
        let mut engine = Permutation::saying(&[]).on(device);
        let (answer, streamed) = answer(&mut engine, &greedy(8, &[]));
        assert_eq!((answer.finish, answer.tokens), (Finish::Stop, vec![END]));
        assert_eq!((answer.text.as_str(), streamed.as_str()), ("", ""));
    }
}

/// Short answers that never leave a stream, and answers without an end that never stop.
#[test]
fn answers_end_where_they_should() {
    let mut engine = Permutation::saying(&[b"ok"]).on(DeviceChoice::Cpu);
    let (short, streamed) = answer(&mut engine, &greedy(8, &[]));
    assert_eq!(
        (short.finish, short.text.as_str(), streamed.as_str()),
        (Finish::Stop, "ok", "ok")
    );
    assert_eq!(short.tokens, [FIRST, END]);
    for device in devices() {
        let mut engine = Permutation::repeating(&[b"ab", b"c"]).on(device);
        for max in [0, 1, 2, 9] {
            let (told, streamed) = answer(&mut engine, &greedy(max, &[]));
            assert_eq!((told.finish, told.tokens.len()), (Finish::Length, max));
            let whole = "abc".repeat(5);
            let wanted: usize = (0..max).map(|i| 2 - i % 2).sum();
            assert_eq!(
                (told.text.as_str(), streamed.as_str()),
                (&whole[..wanted], &whole[..wanted])
            );
        }
    }
}

/// A stop text that is spread over tokens is printed, or text before it is lost.
#[test]
fn stop_texts_over_token_edges_end_the_answer() {
    let pieces: [&[u8]; 6] = [b"one E", b"N", b"Dx EN", b"DING", b"after", b" more"];
    let mut engine = Permutation::saying(&pieces).on(DeviceChoice::Cpu);
    for (stop, wanted) in [
        (&["ENDING"][..], "one ENDx "),
        (&["END"], "one "),
        (&["NDx"], "one E"),
        // Of two in one token the one that starts first.
        (&["D", "ENDx"], "one "),
        (&["G", "more"], "one ENDx ENDIN"),
        (&["one"], ""),
        (&["never"], "one ENDx ENDINGafter more"),
        // Held back because it might have become the stop text, and then did not.
        (&["more than this"], "one ENDx ENDINGafter more"),
    ] {
        let (answer, streamed) = answer(&mut engine, &greedy(20, stop));
        assert_eq!((answer.text.as_str(), streamed.as_str()), (wanted, wanted), "{stop:?}");
        assert_eq!(answer.finish, Finish::Stop);
    }
}

/// A character of several tokens comes out as question marks; a limit inside of one is an error.
#[test]
fn characters_over_token_edges_come_out_whole() {
    let pieces: [&[u8]; 6] = [
        b"a\xf0",
        b"\x9f",
        b"\x98\x80",
        b"\xc3",
        b"\xa9",
        "世\u{1f600}".as_bytes(),
    ];
    let mut engine = Permutation::saying(&pieces).on(DeviceChoice::Cpu);
    let (whole, streamed) = answer(&mut engine, &greedy(20, &[]));
    let wanted = "a\u{1f600}é世\u{1f600}";
    assert_eq!((whole.text.as_str(), streamed.as_str()), (wanted, wanted));
    let (cut, streamed) = answer(&mut engine, &greedy(2, &[]));
    assert_eq!(
        (cut.finish, cut.text.as_str(), streamed.as_str()),
        (Finish::Length, "a\u{fffd}", "a\u{fffd}")
    );
}

/// Control tokens of the model show up in the text, or end an answer that they should not end.
#[test]
fn special_tokens_are_no_text_and_do_not_end_an_answer() {
    let mut model = Permutation::saying(&[b"x", b"<|fim_middle|>", b"y"]);
    model.special.push(FIRST + 1);
    let (answer, _) = answer(&mut model.on(DeviceChoice::Cpu), &greedy(20, &[]));
    assert_eq!((answer.text.as_str(), answer.tokens.len()), ("xy", 4));
}

/// A file without an end-of-turn id runs on and on.
#[test]
fn well_known_ends_of_turn_are_found() {
    let mut model = Permutation::saying(&[b"x", b"<|im_end|>", b"y"]);
    model.special.push(FIRST + 1);
    model.eos.clear();
    let (told, _) = answer(&mut model.on(DeviceChoice::Cpu), &greedy(20, &[]));
    assert_eq!((told.text.as_str(), told.finish), ("x", Finish::Stop));
    // The same text as an ordinary token is text.
    model.special.pop();
    let (told, _) = answer(&mut model.on(DeviceChoice::Cpu), &greedy(3, &[]));
    assert_eq!(told.text, "x<|im_end|>y");
}

/// Of many stop tokens some are forgotten.
#[test]
fn every_stop_token_of_a_file_ends_an_answer() {
    for device in devices() {
        let mut model = Permutation::repeating(&[b"x"]);
        // More than a device watches for; the highest is the one that comes.
        model.eos = (30..60).collect();
        model.next[FIRST as usize] = 59;
        let mut engine = model.on(device);
        let (told, _) = answer(&mut engine, &greedy(20, &[]));
        assert_eq!((told.finish, told.tokens.as_slice()), (Finish::Stop, &[FIRST, 59][..]));
        assert_eq!(told.text, "x");
    }
}

/// A prompt that does not fit crashes, runs for ever, or answers nonsense.
#[test]
fn prompts_as_long_as_the_context_and_longer() {
    for device in devices() {
        let model = Permutation::walking(Dtype::F16);
        let mut engine = model.on(device);
        let prompt = model.path(PROMPT, 65);
        let told = |engine: &mut Engine, prompt: &[u32]| -> Result<Answer> {
            engine.continue_tokens(prompt, &greedy(9, &[]), &Cancel::new(), &mut |_| {
                ControlFlow::Continue(())
            })
        };
        let full = told(&mut engine, &prompt[..64]).unwrap();
        assert_eq!((full.finish, full.tokens), (Finish::Context, model.path(prompt[63], 1)));
        let err = told(&mut engine, &prompt).unwrap_err();
        assert_eq!(err.kind, Kind::ContextFull);
        assert!(err.message.contains("65") && err.message.contains("64"), "{err}");
        assert_eq!(told(&mut engine, &[]).unwrap_err().kind, Kind::Usage);
        assert_eq!(told(&mut engine, &[64]).unwrap_err().kind, Kind::Usage);
        // None of that hurt the engine.
        let after = told(&mut engine, &prompt[..3]).unwrap();
        assert_eq!(after.tokens, model.path(prompt[2], 9));
    }
}

/// The same prompt twice panics in the cache; the cache changes what a seed gives.
#[test]
fn a_cached_prompt_and_a_seed_give_the_same_answer_again() {
    for device in devices() {
        let mut model = Permutation::walking(Dtype::F16);
        // Flat enough that a draw decides.
        model.logits = [0.2, 0.0];
        let mut engine = model.on(device);
        let prompt = model.path(PROMPT, 20);
        let seeded = |seed| AnswerOptions {
            sampling: Some(Sampling {
                temperature: 1.0,
                seed,
                ..Sampling::default()
            }),
            max_tokens: Some(30),
            ..AnswerOptions::default()
        };
        let mut told = |seed| {
            let told = engine.continue_tokens(&prompt, &seeded(seed), &Cancel::new(), &mut |_| {
                ControlFlow::Continue(())
            });
            told.unwrap()
        };
        let (first, second, other) = (told(5), told(5), told(6));
        assert_eq!((first.cached_tokens, second.cached_tokens), (0, 19));
        assert_eq!(first.tokens, second.tokens);
        assert_ne!(first.tokens, other.tokens);
    }
}

/// A second model in the process gets pieces of the first.
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

/// Engines in several threads stall each other or mix their answers.
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

/// An overlay that names a weight outside of its matrix is uploaded as it is, or only fails while the model is running.
#[test]
fn overlays_that_do_not_fit_are_refused_by_name_when_loading() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.cmf");
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/interop/qwen2-q1s.cmf");
    let mut file = std::fs::read(&fixture).unwrap();
    let data_off = u64::from_le_bytes(file[0x30..0x38].try_into().unwrap());
    let container = Container::open(&fixture).unwrap();
    let tensor = container.find("model.layers.1.mlp.up_proj.weight").unwrap();
    let info = &container.infos()[tensor];
    // The last entry's index: 4 bytes, and 2 of value behind them.
    let end = (data_off + info.offset + info.nbytes) as usize;
    let (rows, cols) = info.rows_cols();
    file[end - 6..end - 2].copy_from_slice(&((rows * cols) as u32).to_le_bytes());
    std::fs::write(&path, file).unwrap();
    for device in devices() {
        let options = LoadOptions {
            device,
            ..LoadOptions::default()
        };
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

/// A limit that is larger than all memory counts as none, or as zero.
#[test]
fn a_huge_memory_limit_is_no_limit() {
    let (_dir, path) = Permutation::saying(&[b"x"]).file();
    for vram_mb in [1 << 44, u64::MAX] {
        let options = LoadOptions {
            device: DeviceChoice::Cpu,
            vram_mb: Some(vram_mb),
            ..LoadOptions::default()
        };
        assert!(Engine::load(&path, &options, &mut |_, _| ControlFlow::Continue(())).is_ok());
    }
}
