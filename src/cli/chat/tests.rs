//! Whole chats with a small model of random weights on the CPU reference: typed lines in, printed text out.

use super::*;
use cmf_gpu::convert::{self, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfContainer, CmfWriter, Sections};
use cmf_gpu::options::DeviceChoice;
use cmf_gpu::tools::skill::{self, New};
use cmf_gpu::{Error, LoadOptions};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;

#[path = "../../../tests/golden/mod.rs"]
mod golden;

struct Typed(VecDeque<Line>);

impl Lines for Typed {
    fn line(&mut self, _: &str) -> Result<Line> {
        Ok(self.0.pop_front().unwrap_or(Line::End))
    }
}

fn typed(lines: &[&str]) -> Typed {
    let line = |text: &&str| match *text {
        "^C" => Line::Interrupted,
        text => Line::Text(text.into()),
    };
    Typed(lines.iter().map(line).collect())
}

/// A sink that keeps everything. It presses Ctrl-C or fails after a number of bytes.
#[derive(Default)]
struct Screen<'a> {
    text: String,
    said: Vec<String>,
    notes: Vec<String>,
    ctrl_c_after: Option<usize>,
    broken_after: Option<usize>,
    cancel: Option<&'a RefCell<Cancel>>,
}

impl Sink for Screen<'_> {
    fn text(&mut self, text: &str) -> Result<()> {
        self.text.push_str(text);
        if self.ctrl_c_after.is_some_and(|limit| self.text.len() > limit) {
            self.cancel.unwrap().borrow().cancel();
        }
        match self.broken_after {
            Some(limit) if self.text.len() > limit => Err(Error::new(Kind::Io, "stdout: full")),
            _ => Ok(()),
        }
    }

    fn say(&mut self, text: &str) {
        self.said.push(text.into());
    }

    fn note(&mut self, text: &str) {
        self.notes.push(text.into());
    }
}

impl Screen<'_> {
    fn said(&self, part: &str) -> bool {
        self.said.iter().any(|said| said.contains(part))
    }

    fn expect(&self, part: &str) {
        assert!(self.said(part), "{part}: {:?}", self.said);
    }
}

fn engine(ctx: u32) -> Engine {
    let src = tempfile::tempdir().unwrap();
    golden::unpack("llama_tied", src.path());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.cmf");
    let quant = convert::Options::new(Dtype::F16);
    convert(src.path(), &path, &quant, &mut |_| ControlFlow::Continue(())).unwrap();
    loaded(&path, ctx)
}

fn loaded(path: &Path, ctx: u32) -> Engine {
    let options = LoadOptions::default().device(DeviceChoice::Cpu).ctx(ctx);
    Engine::load(path, &options, &mut |_, _| ControlFlow::Continue(())).unwrap()
}

fn settings(max_tokens: usize) -> Settings {
    Settings {
        sampling: Sampling::greedy(),
        seed: None,
        max_tokens,
    }
}

/// A greedy chat.
fn chat(engine: &mut Engine, max_tokens: usize) -> Chat<'_> {
    Chat::new(engine, None, settings(max_tokens), AnswerOptions::default()).unwrap()
}

fn go(chat: &mut Chat, lines: &[&str], screen: &mut Screen) -> Outcome {
    chat.run(&mut typed(lines), &mut Cancel::new, screen).unwrap()
}

fn roles(chat: &Chat) -> Vec<String> {
    chat.messages.iter().map(|message| message.role().into()).collect()
}

/// The answer of a new engine.
fn afresh(messages: &[Message], sampling: Sampling, max_tokens: usize) -> String {
    let options = AnswerOptions::default().sampling(sampling).max_tokens(max_tokens);
    let mut ignore = |_: &str| ControlFlow::Continue(());
    engine(256)
        .chat(messages, &options, &Cancel::new(), &mut ignore)
        .unwrap()
        .text
}

#[test]
fn every_answer_is_to_the_whole_conversation_and_what_is_cached_is_not_run_again() {
    let mut engine = engine(256);
    let mut chat = chat(&mut engine, 8);
    let mut screen = Screen::default();
    let outcome = go(&mut chat, &["Hello there", "", "  ", "And \\", "more?"], &mut screen);
    assert!(matches!(outcome, Outcome::Done));
    assert_eq!(roles(&chat), ["user", "assistant", "user", "assistant"]);
    assert_eq!(chat.messages[2].content(), "And \nmore?");
    for end in [1, 3] {
        let expected = afresh(&chat.messages[..end], Sampling::greedy(), 8);
        assert_eq!(chat.messages[end].content(), expected);
        assert!(!expected.is_empty() && screen.text.contains(&expected));
    }
    assert!(screen.text.ends_with('\n'));
    assert_eq!((screen.notes.len(), screen.said.len()), (2, 0), "{:?}", screen.said);
    assert!(screen.notes[0].starts_with("[prompt ") && !screen.notes[0].contains("cached"));
    // At least the first message, "[INST] Hello there [/INST]".
    let (_, cached) = screen.notes[1].split_once(" tok (").unwrap();
    let (cached, _) = cached.split_once(" cached) ").unwrap();
    assert!(cached.parse::<usize>().unwrap() > 8, "{}", screen.notes[1]);
    go(&mut chat, &["/stats"], &mut screen);
    assert!(screen.said("4 messages, ") && screen.said(&screen.notes[1]) && screen.said("CPU reference"));
}

#[test]
fn the_system_message_and_the_end_of_a_conversation() {
    let mut engine = engine(256);
    let mut chat = chat(&mut engine, 6);
    let mut screen = Screen::default();
    let system = Message::system("Be brief.");
    let user = Message::user("Hello");
    let lines = ["forgotten", "/system Be brief.", "/clear", "/stats", "Hello"];
    go(&mut chat, &lines, &mut screen);
    assert_eq!(roles(&chat), ["user", "assistant"]);
    screen.expect("0 messages and a system message, ");
    let wanted = afresh(&[system, user.clone()], Sampling::greedy(), 6);
    assert_eq!(chat.messages[1].content(), wanted);
    go(&mut chat, &["/system", "/clear", "Hello"], &mut screen);
    assert_eq!(chat.messages[1].content(), afresh(&[user], Sampling::greedy(), 6));
}

#[test]
fn what_is_not_understood_changes_nothing() {
    let mut engine = engine(256);
    let mut chat = chat(&mut engine, 4);
    let mut screen = Screen::default();
    go(&mut chat, &["Hello"], &mut screen);
    let (before, notes) = (chat.messages.clone(), screen.notes.len());
    let lines = ["/sytem x", "/set speed 9", "/set temp hot", "/set", "/help"];
    go(&mut chat, &lines, &mut screen);
    let lines = ["/set task poetry", "/set skill auto", "/set task none"];
    go(&mut chat, &lines, &mut screen);
    assert_eq!((&chat.messages, screen.notes.len()), (&before, notes));
    assert_eq!(chat.settings, settings(4));
    for hint in [
        "no command /sytem; /help",
        "no setting speed",
        "max-tokens, task, skill",
        "max-tokens 4\ntask none\nskill none",
        "no task 'poetry': the model has no tasks",
        "auto needs the prompt",
        "temp hot",
        "max-tokens 4",
        "/regen",
    ] {
        screen.expect(hint);
    }
    go(&mut chat, &["//x", "/exit", "never"], &mut screen);
    assert_eq!((roles(&chat).len(), chat.messages[2].content()), (4, "/x"));
}

#[test]
fn settings_count_from_the_next_answer_on() {
    let mut engine = engine(256);
    let mut chat = chat(&mut engine, 4);
    let mut screen = Screen::default();
    let lines = ["/regen", "Hello", "/set max-tokens 2", "Hello"];
    go(&mut chat, &lines, &mut screen);
    screen.expect("no message to answer again");
    assert!(screen.notes[0].contains("| gen 4 tok") && screen.notes[1].contains("| gen 2 tok"));
}

#[test]
fn an_answer_made_anew_is_another_one_that_can_be_repeated() {
    let mut engine = engine(256);
    let mut chat = chat(&mut engine, 12);
    let mut screen = Screen::default();
    let mut answers = Vec::new();
    let lines = ["/set temp 1.5", "/set top-p 1", "/set top-k 0", "/set seed 7", "Hello"];
    go(&mut chat, &lines, &mut screen);
    for _ in 0..3 {
        assert_eq!(roles(&chat), ["user", "assistant"]);
        answers.push(chat.messages[1].content().to_owned());
        go(&mut chat, &["/regen"], &mut screen);
    }
    for (answer, seed) in answers.iter().zip(7..) {
        let sampling = Sampling {
            seed,
            ..chat.settings.sampling.clone()
        };
        assert_eq!(*answer, afresh(&[Message::user("Hello")], sampling, 12));
    }
    assert!(answers[0] != answers[1] && answers[1] != answers[2]);
    assert!(screen.notes.iter().all(|note| !note.contains("temp 0")));
}

#[test]
fn ctrl_c_ends_an_answer_and_keeps_the_text() {
    let mut engine = engine(256);
    let mut chat = chat(&mut engine, 200);
    let current = RefCell::new(Cancel::new());
    let mut renewed = || {
        current.replace(Cancel::new());
        current.borrow().clone()
    };
    let mut screen = Screen {
        ctrl_c_after: Some(10),
        cancel: Some(&current),
        ..Screen::default()
    };
    chat.run(&mut typed(&["Hello"]), &mut renewed, &mut screen).unwrap();
    assert!(screen.notes[0].ends_with("finish: interrupted]"), "{:?}", screen.notes);
    assert_eq!(chat.messages[1].content(), screen.text.trim_end_matches('\n'));
    assert!(screen.text.len() > 10 && screen.text.len() < 100, "{}", screen.text);
    // Another turn is a turn like any other.
    screen.ctrl_c_after = None;
    let mut lines = typed(&["/set max-tokens 3", "More"]);
    chat.run(&mut lines, &mut renewed, &mut screen).unwrap();
    assert!(screen.notes[1].ends_with("finish: length]"), "{:?}", screen.notes);
    assert_eq!(roles(&chat), ["user", "assistant", "user", "assistant"]);
    // Before there is any text there is nothing to keep.
    let mut cancelled = || {
        let cancel = Cancel::new();
        cancel.cancel();
        cancel
    };
    let before = chat.messages.clone();
    let mut lines = typed(&["Even more", "/regen"]);
    chat.run(&mut lines, &mut cancelled, &mut screen).unwrap();
    assert_eq!(chat.messages, before);
}

#[test]
fn ctrl_c_at_the_prompt_leaves_the_second_time() {
    let mut engine = engine(256);
    let mut chat = chat(&mut engine, 2);
    let mut screen = Screen::default();
    let outcome = go(&mut chat, &["^C", "/stats", "^C", ""], &mut screen);
    assert!(matches!(outcome, Outcome::Done));
    // The lines before it are gone, too.
    let lines = ["lost\\", "^C", "Hello", "^C", "^C", "never"];
    assert!(matches!(go(&mut chat, &lines, &mut screen), Outcome::Interrupted));
    assert_eq!((roles(&chat).len(), chat.messages[0].content()), (2, "Hello"));
}

#[test]
fn a_message_that_does_not_fit_is_discarded() {
    let mut engine = engine(64);
    let mut chat = chat(&mut engine, 4);
    let mut screen = Screen::default();
    let long = "word ".repeat(60);
    go(&mut chat, &[&long], &mut screen);
    assert_eq!(chat.messages.len(), 0);
    screen.expect("error: ContextFull: ");
    assert!(!screen.said("/clear"), "{:?}", screen.said);
    go(&mut chat, &["Hi"], &mut screen);
    let before = chat.messages.clone();
    go(&mut chat, &[&long], &mut screen);
    screen.expect("the message is discarded; /clear starts");
    assert_eq!((before.len(), &chat.messages), (2, &before));
    // An answer that fills the context is an answer.
    go(&mut chat, &["/set max-tokens 1000", "Hi"], &mut screen);
    screen.expect("the context is full; /clear");
    assert_eq!(roles(&chat).len(), 4);
    go(&mut chat, &["/clear", "/set max-tokens 4", "Hi"], &mut screen);
    assert_eq!(chat.messages, before);
}

#[test]
fn what_cannot_be_shown_ends_the_chat() {
    let mut engine = engine(256);
    let mut chat = chat(&mut engine, 50);
    let mut screen = Screen {
        broken_after: Some(5),
        ..Screen::default()
    };
    let ended = chat.run(&mut typed(&["Hello", "more"]), &mut Cancel::new, &mut screen);
    assert_eq!(ended.err().unwrap().message, "stdout: full");
    assert!(screen.text.len() < 30 && screen.notes.is_empty());
}

#[test]
fn a_skill_brings_its_mask_unless_a_task_was_set() {
    let interop = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/interop");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.cmf");
    let masked = std::fs::read(interop.join("qwen2-q8_row-densemasks.cmf")).unwrap();
    std::fs::write(&path, masked).unwrap();
    let new = New {
        id: "s".into(),
        input_mask_task: Some("narrow".into()),
        ..New::default()
    };
    let source = interop.join("qwen2-q4tp.cmf");
    skill::add(&path, &source, &new, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let mut engine = loaded(&path, 64);
    let mut chat = chat(&mut engine, 2);
    let mut screen = Screen::default();
    let unmeasured = "skill s; its quality was not measured";
    let lines = ["/set task", "/set skill s", "/set skill none"];
    go(&mut chat, &lines, &mut screen);
    let wanted = ["task general", unmeasured, "task narrow", "skill none", "task general"];
    assert_eq!(screen.said, wanted);
    let mut screen = Screen::default();
    let lines = ["/set task general", "/set skill s", "/set skill lost", "/set skill"];
    go(&mut chat, &lines, &mut screen);
    let wanted = [
        "task general",
        unmeasured,
        "no skill 'lost'; existing skills: s",
        unmeasured,
    ];
    assert_eq!(screen.said, wanted);
    let overruled = "note: skill 's' was made for task 'narrow', but task 'general' was chosen";
    assert_eq!(screen.notes, [overruled]);
    // The default task again.
    let mut screen = Screen::default();
    let lines = ["/set task default", "/set skill none", "/help"];
    go(&mut chat, &lines, &mut screen);
    assert_eq!(screen.said[..3], ["task narrow", "skill none", "task general"]);
    screen.expect("default = the task of the skill");
}

/// A mask named like the keyword of the default task can be chosen, with a note.
#[test]
fn a_mask_named_default_can_be_chosen() {
    let interop = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/interop");
    let model = CmfContainer::open(&interop.join("qwen2-q8_row-densemasks.cmf")).unwrap();
    let mut masks = model.masks().unwrap().clone();
    masks.masks[1].name = "default".into();
    let masks = masks.to_bytes().unwrap();
    let specs = model.infos().iter().map(TensorSpec::from).collect();
    let sections = Sections {
        masks: Some(&masks),
        index: None,
        ..model.sections().unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.cmf");
    let mut writer = CmfWriter::create(&path, model.header_json().clone(), specs, sections).unwrap();
    (0..model.infos().len()).for_each(|id| writer.write(model.bytes(id).unwrap()).unwrap());
    writer.finish().unwrap();
    let mut engine = loaded(&path, 64);
    let mut chat = chat(&mut engine, 2);
    let mut screen = Screen::default();
    go(&mut chat, &["/set task none", "/set task default"], &mut screen);
    assert_eq!(screen.said, ["task none", "task default"]);
    let note = "the model has a task named default";
    assert!(screen.notes[0].contains(note), "{:?}", screen.notes);
}
