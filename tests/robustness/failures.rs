//! What fails while a model runs: the text so far stays, the error is clear, the engine goes on.

use crate::permutation::{FIRST, PROMPT, Permutation, devices, greedy, load};
use cmf_gpu::Kind;
use cmf_gpu::options::DeviceChoice;
use cmf_gpu::session::{Cancel, Finish};
use std::fs::OpenOptions;
use std::ops::ControlFlow;

/// Says "héllo", then a token whose embedding is no number.
fn breaking() -> Permutation {
    let mut model = Permutation::saying(&[b"h\xc3", b"\xa9", b"ll", b"o S", b"T", b"x"]);
    model.broken = Some(FIRST + 4);
    model
}

/// Logits that are no numbers become "!!!!" or token 0 for ever.
#[test]
fn logits_that_are_no_numbers_end_the_answer_and_keep_the_text() {
    for device in devices() {
        let mut engine = breaking().on(device);
        for _ in 0..2 {
            let mut streamed = String::new();
            let told = engine.continue_tokens(&[PROMPT], &greedy(20, &["STOP"]), &Cancel::new(), &mut |text| {
                streamed.push_str(text);
                ControlFlow::Continue(())
            });
            let err = told.unwrap_err();
            assert_eq!(err.kind, Kind::NonFinite, "{err}");
            // The prompt, five tokens, and then the one that could not be chosen.
            assert!(err.message.contains("position 6"), "{err}");
            // What was held back because it might have become the stop text is there, too.
            assert_eq!(streamed, "héllo ST");
        }
        // The error left nothing behind: the same engine still answers.
        let told = engine.continue_tokens(&[PROMPT], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(told.unwrap().text, "héll");
        // Nor does a broken prompt.
        let told = engine.continue_tokens(&[FIRST + 4], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(told.unwrap_err().kind, Kind::NonFinite);
        let told = engine.continue_tokens(&[PROMPT], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(told.unwrap().text, "héll");
    }
}

/// A file that is cut while it is mapped kills the process.
#[test]
fn a_file_cut_while_a_model_runs_is_an_error() {
    let model = Permutation::repeating(&[b"a", b"b"]);
    for device in devices() {
        let (_dir, path) = model.file();
        let mut engine = load(&path, device.clone(), 512);
        let mut count = 0;
        let told = engine.continue_tokens(&[PROMPT], &greedy(400, &[]), &Cancel::new(), &mut |_| {
            count += 1;
            if count == 5 {
                OpenOptions::new()
                    .write(true)
                    .open(&path)
                    .unwrap()
                    .set_len(4096)
                    .unwrap();
            }
            ControlFlow::Continue(())
        });
        match device {
            // Weights stay in the file.
            DeviceChoice::Cpu => {
                let err = told.unwrap_err();
                assert_eq!(err.kind, Kind::Io, "{err}");
                assert!(
                    err.message.contains("was cut") && err.message.contains("model.cmf"),
                    "{err}"
                );
                assert!(count < 400);
            }
            // Weights are on the device: nothing is missing.
            _ => assert_eq!(told.unwrap().finish, Finish::Length),
        }
    }
}

/// Cancelling does not end a prompt, or the engine is of no use afterwards.
#[test]
fn cancelling_ends_prompt_and_answer_and_leaves_the_engine_sound() {
    for device in devices() {
        let model = Permutation::repeating(&[b"a", b"b"]);
        let (_dir, path) = model.file();
        let mut engine = load(&path, device, 512);
        let cancel = Cancel::new();
        cancel.cancel();
        let told = engine.continue_tokens(&[PROMPT; 300], &greedy(9, &[]), &cancel, &mut |_| {
            ControlFlow::Continue(())
        });
        let told = told.unwrap();
        assert_eq!(
            (told.finish, told.tokens.len(), told.text.as_str()),
            (Finish::Interrupted, 0, "")
        );
        let cancel = Cancel::new();
        let mut streamed = String::new();
        let told = engine.continue_tokens(&[PROMPT], &greedy(400, &[]), &cancel, &mut |text| {
            streamed.push_str(text);
            if streamed.len() == 7 {
                cancel.cancel();
            }
            ControlFlow::Continue(())
        });
        let told = told.unwrap();
        assert_eq!(told.finish, Finish::Interrupted);
        assert!(
            told.text.len() < 12 && "ab".repeat(9).starts_with(&told.text) && told.text == streamed,
            "{streamed}"
        );
        let told = engine.continue_tokens(&[PROMPT], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(told.unwrap().text, "aba");
    }
}

/// Loading cannot be stopped.
#[test]
fn loading_can_be_cancelled() {
    let (_dir, path) = Permutation::saying(&[b"x"]).file();
    let options = cmf_gpu::options::LoadOptions {
        device: DeviceChoice::Index(0),
        ..Default::default()
    };
    let err = cmf_gpu::Engine::load(&path, &options, &mut |_, _| ControlFlow::Break(()))
        .err()
        .unwrap();
    assert!(
        err.kind == Kind::Interrupted && err.message.contains("cancelled"),
        "{err}"
    );
}

/// A plan that does not fit fails while it is allocated, or says nothing that helps.
#[test]
fn what_does_not_fit_says_what_it_needs_what_there_is_and_what_helps() {
    let (_dir, path) = Permutation::saying(&[b"x"]).file();
    let refused = |device: &DeviceChoice, ctx, vram_mb| {
        let options = cmf_gpu::options::LoadOptions {
            device: device.clone(),
            ctx: Some(ctx),
            vram_mb,
            ..Default::default()
        };
        let err = cmf_gpu::Engine::load(&path, &options, &mut |_, _| ControlFlow::Continue(()))
            .err()
            .unwrap();
        assert_eq!(err.kind, Kind::OutOfMemory, "{err}");
        err.message
    };
    for device in devices() {
        // 65536 positions of 2 layers, keys and values, 32 halves: 16 MiB, beside tables and scratch.
        let long = refused(&device, 65536, Some(10));
        assert!(
            long.contains("allows 10") && long.contains("--vram-mb") && long.contains("--ctx"),
            "{long}"
        );
        let digits = long.split("needs ").nth(1).unwrap();
        let need: u64 = digits.split(' ').next().unwrap().parse().unwrap();
        assert!((16..64).contains(&need), "{long}");
        // More than any machine has, and more than a device binds.
        let endless = refused(&device, u32::MAX, None);
        let have = ["MiB are free", "the device binds"]
            .iter()
            .any(|text| endless.contains(text));
        assert!(
            have && endless.contains("needs") && endless.contains("--ctx"),
            "{endless}"
        );
    }
    let weights = refused(&DeviceChoice::Index(0), 64, Some(0));
    assert!(
        weights.contains("weights") && weights.contains("quantisation"),
        "{weights}"
    );
}
