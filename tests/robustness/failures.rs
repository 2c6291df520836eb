//! Failures while a model runs: the text so far is kept, the error is clear, the engine still works.

use crate::permutation::{FIRST, PROMPT, Permutation, devices, greedy, load};
use cmf_gpu::Kind;
use cmf_gpu::lm::run::{Cancel, Finish};
use cmf_gpu::options::DeviceChoice;
use std::fs::OpenOptions;
use std::ops::ControlFlow;

/// Answers "héllo ST" and then a token whose embedding is NaN.
fn breaking() -> Permutation {
    let mut model = Permutation::answering(&[b"h\xc3", b"\xa9", b"ll", b"o S", b"T", b"x"]);
    model.broken = Some(FIRST + 4);
    model
}

/// Guards against choosing token 0 forever when the logits are NaN.
#[test]
fn logits_that_are_nan_end_the_answer_and_keep_the_text() {
    for device in devices() {
        let mut engine = breaking().on(device);
        for _ in 0..2 {
            let mut streamed = String::new();
            let reply = engine.continue_tokens(&[PROMPT], &greedy(20, &["STOP"]), &Cancel::new(), &mut |text| {
                streamed.push_str(text);
                ControlFlow::Continue(())
            });
            let err = reply.unwrap_err();
            assert_eq!(err.kind, Kind::NonFinite, "{err}");
            // The prompt token, five tokens, and the position whose token cannot be chosen.
            assert!(err.message.contains("position 6"), "{err}");
            // The text that could have become the stop text is returned, too.
            assert_eq!(streamed, "héllo ST");
        }
        // The same engine still answers after the error.
        let reply = engine.continue_tokens(&[PROMPT], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(reply.unwrap().text, "héll");
        // The same after an error in the prompt.
        let reply = engine.continue_tokens(&[FIRST + 4], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(reply.unwrap_err().kind, Kind::NonFinite);
        let reply = engine.continue_tokens(&[PROMPT], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(reply.unwrap().text, "héll");
    }
}

/// Guards against a crash when a mapped file is truncated.
#[test]
fn a_file_cut_while_a_model_runs_is_an_error() {
    let model = Permutation::repeating(&[b"a", b"b"]);
    for device in devices() {
        let (_dir, path) = model.file();
        let mut engine = load(&path, device.clone(), 512);
        let mut count = 0;
        let reply = engine.continue_tokens(&[PROMPT], &greedy(400, &[]), &Cancel::new(), &mut |_| {
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
            // The CPU reads weights from the file.
            DeviceChoice::Cpu => {
                let err = reply.unwrap_err();
                assert_eq!(err.kind, Kind::Io, "{err}");
                assert!(
                    err.message.contains("was truncated") && err.message.contains("model.cmf"),
                    "{err}"
                );
                assert!(count < 400);
            }
            // The weights are on the device; the file is no longer needed.
            _ => assert_eq!(reply.unwrap().finish, Finish::Length),
        }
    }
}

/// Guards against prompts that cannot be cancelled, and against an engine that fails afterwards.
#[test]
fn cancelling_ends_prompt_and_answer_and_leaves_the_engine_usable() {
    for device in devices() {
        let model = Permutation::repeating(&[b"a", b"b"]);
        let (_dir, path) = model.file();
        let mut engine = load(&path, device, 512);
        let cancel = Cancel::new();
        cancel.cancel();
        let reply = engine.continue_tokens(&[PROMPT; 300], &greedy(9, &[]), &cancel, &mut |_| {
            ControlFlow::Continue(())
        });
        let reply = reply.unwrap();
        assert_eq!(
            (reply.finish, reply.tokens.len(), reply.text.as_str()),
            (Finish::Interrupted, 0, "")
        );
        let cancel = Cancel::new();
        let mut streamed = String::new();
        let reply = engine.continue_tokens(&[PROMPT], &greedy(400, &[]), &cancel, &mut |text| {
            streamed.push_str(text);
            if streamed.len() == 7 {
                cancel.cancel();
            }
            ControlFlow::Continue(())
        });
        let reply = reply.unwrap();
        assert_eq!(reply.finish, Finish::Interrupted);
        assert!(
            reply.text.len() < 12 && "ab".repeat(9).starts_with(&reply.text) && reply.text == streamed,
            "{streamed}"
        );
        let reply = engine.continue_tokens(&[PROMPT], &greedy(3, &[]), &Cancel::new(), &mut |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(reply.unwrap().text, "aba");
    }
}

/// Guards against loading that cannot be cancelled.
#[test]
fn loading_can_be_cancelled() {
    let (_dir, path) = Permutation::answering(&[b"x"]).file();
    let options = cmf_gpu::options::LoadOptions::default().device(DeviceChoice::Index(0));
    let err = cmf_gpu::Engine::load(&path, &options, &mut |_, _| ControlFlow::Break(()))
        .err()
        .unwrap();
    assert!(
        err.kind == Kind::Interrupted && err.message.contains("cancelled"),
        "{err}"
    );
}

/// Guards against failures during allocation, and against errors without the sizes and a remedy.
#[test]
fn an_out_of_memory_error_has_the_needed_and_available_sizes_and_a_remedy() {
    let (_dir, path) = Permutation::answering(&[b"x"]).file();
    let refused = |device: &DeviceChoice, ctx, vram_mb| {
        let options = cmf_gpu::options::LoadOptions::default()
            .device(device.clone())
            .ctx(ctx)
            .vram_mb(vram_mb);
        let err = cmf_gpu::Engine::load(&path, &options, &mut |_, _| ControlFlow::Continue(()))
            .err()
            .unwrap();
        assert_eq!(err.kind, Kind::OutOfMemory, "{err}");
        err.message
    };
    for device in devices() {
        // 65536 positions, 2 layers, keys and values of 32 f16 each: 16 MiB, plus tables and scratch buffers.
        let long = refused(&device, 65536, Some(10));
        assert!(
            long.contains("the memory limit is 10 MiB") && long.contains("a shorter context"),
            "{long}"
        );
        let digits = long.split("needs ").nth(1).unwrap();
        let need: u64 = digits.split(' ').next().unwrap().parse().unwrap();
        assert!((16..64).contains(&need), "{long}");
        // More than the memory of any machine, and more than the largest binding of a device.
        let endless = refused(&device, u32::MAX, None);
        let have = ["MiB are free", "a binding has at most"]
            .iter()
            .any(|text| endless.contains(text));
        assert!(
            have && endless.contains("needs") && endless.contains("context"),
            "{endless}"
        );
    }
    let weights = refused(&DeviceChoice::Index(0), 64, Some(0));
    assert!(
        weights.contains("weights") && weights.contains("quantisation"),
        "{weights}"
    );
}
