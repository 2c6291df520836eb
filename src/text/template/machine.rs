//! Renders a parsed template: its statements.

use super::arguments::{Arguments, wrong};
use super::ast::{Applied, Body, Loop, Macro, Node, Program, Statement, Target};
use super::limits::{Budget, Fault, Outcome};
use super::value::{Cells, Closure, Key, LoopState, Scope, Source, Value, count};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

/// Deepest nesting of evaluations: expressions in expressions, blocks in blocks, macros in macros.
const MAX_DEPTH: u32 = 2_000;
/// Most scopes and namespaces that stay in memory because something may refer to them.
const MAX_KEPT: usize = 100_000;

/// The state of a rendering.
pub(super) struct Machine<'a> {
    pub(super) program: &'a Program,
    pub(super) budget: Budget,
    /// The variables that were passed to the template, and functions.
    pub(super) globals: HashMap<Arc<str>, Value>,
    /// The time for `strftime_now`.
    pub(super) now: SystemTime,
    /// How often `random` has chosen.
    pub(super) choices: u64,
    /// What the innermost block has printed.
    out: String,
    depth: u32,
    /// The variables of the template.
    root: Rc<Scope>,
    /// Loops whose `changed` was called, with values that may refer to the loop.
    loops: Vec<Rc<LoopState>>,
    /// Scopes that a macro refers to, and namespaces. They may refer to themselves.
    kept: Vec<Rc<Cells>>,
}

/// How statements end.
#[derive(Clone, Copy, PartialEq)]
enum Flow {
    Next,
    Break,
    Continue,
}

impl Drop for Machine<'_> {
    fn drop(&mut self) {
        let mut values = Vec::new();
        for cells in &self.kept {
            values.push(cells.clear());
        }
        for state in &self.loops {
            state.changed.take();
        }
    }
}

impl<'a> Machine<'a> {
    pub(super) fn new(
        program: &'a Program,
        budget: Budget,
        globals: HashMap<Arc<str>, Value>,
        now: SystemTime,
    ) -> Machine<'a> {
        Machine {
            program,
            budget,
            globals,
            now,
            choices: 0,
            out: String::new(),
            depth: 0,
            root: Scope::new(None),
            loops: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// The text of the whole template.
    pub(super) fn run(&mut self) -> Outcome<String> {
        let program = self.program;
        let root = self.root.clone();
        self.body(&program.body, &root)?;
        Ok(std::mem::take(&mut self.out))
    }

    /// Runs `work` one level deeper.
    pub(super) fn nested<T>(&mut self, work: impl FnOnce(&mut Self) -> Outcome<T>) -> Outcome<T> {
        if self.depth >= MAX_DEPTH {
            let message = format!("nested too deeply while rendering, expected at most {MAX_DEPTH} levels");
            return Err(Fault::new("limit", message));
        }
        self.depth += 1;
        let result = work(self);
        self.depth -= 1;
        result
    }

    /// Keeps values that may refer to themselves until the end.
    pub(super) fn keep(&mut self, cells: &Rc<Cells>) -> Outcome<()> {
        if self.kept.len() >= MAX_KEPT {
            return Err(Fault::new(
                "limit",
                format!("more than {MAX_KEPT} namespaces and macros"),
            ));
        }
        self.kept.push(cells.clone());
        Ok(())
    }

    /// Python's `loop.changed(...)`.
    pub(super) fn changed(&mut self, state: &Rc<LoopState>, values: Value) -> Outcome<Value> {
        let before = state.changed.replace(Some(values.clone()));
        match before {
            Some(before) => Ok(Value::Bool(!self.equals(&before, &values)?)),
            None => {
                self.loops.push(state.clone());
                Ok(Value::Bool(true))
            }
        }
    }

    /// What `work` prints.
    fn captured(&mut self, work: impl FnOnce(&mut Self) -> Outcome<Flow>) -> Outcome<(String, Flow)> {
        let outer = std::mem::take(&mut self.out);
        let flow = work(self);
        let text = std::mem::replace(&mut self.out, outer);
        Ok((text, flow?))
    }

    fn print(&mut self, text: &str) -> Outcome<()> {
        self.budget.bytes(text.len() as u64)?;
        self.out.push_str(text);
        Ok(())
    }

    /// Prints what a `filter` or `call` block makes, which must be a string.
    fn print_string(&mut self, value: &Value) -> Outcome<()> {
        let text = value.as_str();
        self.print(text.ok_or_else(|| wrong("the text of a block", "a string", value))?)
    }

    /// Runs statements in `scope`, which is theirs.
    fn body(&mut self, body: &Body, scope: &Rc<Scope>) -> Outcome<Flow> {
        self.budget.steps(body.unset.len() as u64)?;
        for name in &body.unset {
            scope
                .cells
                .set(name.clone(), Value::undefined(format!("'{name}' is undefined")));
        }
        self.nodes(&body.nodes, scope)
    }

    fn nodes(&mut self, nodes: &[Node], scope: &Rc<Scope>) -> Outcome<Flow> {
        for node in nodes {
            self.budget.steps(1)?;
            let flow = match &node.kind {
                Statement::Text(text) => self.print(text).map(|()| Flow::Next),
                Statement::Print(value) => self.eval(value, scope).and_then(|value| {
                    let text = self.text(&value)?;
                    self.print(&text)?;
                    Ok(Flow::Next)
                }),
                Statement::Break => return Ok(Flow::Break),
                Statement::Continue => return Ok(Flow::Continue),
                other => self.nested(|machine| machine.statement(other, scope)),
            };
            match flow.map_err(|fault| fault.at(node.line))? {
                Flow::Next => {}
                flow => return Ok(flow),
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &Statement, scope: &Rc<Scope>) -> Outcome<Flow> {
        match statement {
            Statement::Text(_) | Statement::Print(_) | Statement::Break | Statement::Continue => {}
            Statement::Set(target, value) => {
                let value = self.eval(value, scope)?;
                self.assign(target, value, scope)?;
            }
            Statement::SetBlock(target, filters, body) => {
                let inner = Scope::new(Some(scope));
                let (text, flow) = self.captured(|machine| machine.body(body, &inner))?;
                let value = self.filtered(text.into(), filters, &inner)?;
                self.assign(target, value, scope)?;
                return Ok(flow);
            }
            Statement::If(branches, otherwise) => {
                for (test, nodes) in branches {
                    if self.eval(test, scope)?.truth() {
                        return self.nodes(nodes, scope);
                    }
                }
                return self.nodes(otherwise, scope);
            }
            Statement::For(code) => {
                let items = self.eval(&code.items, scope)?;
                return self.iterate(code, scope, &items, 0);
            }
            Statement::With(pairs, body) => {
                let inner = Scope::new(Some(scope));
                for (target, value) in pairs {
                    let value = self.eval(value, scope)?;
                    self.assign(target, value, &inner)?;
                }
                return self.body(body, &inner);
            }
            Statement::Macro(code) => {
                let closure = self.closure(code, scope)?;
                if let Some(name) = &code.name {
                    scope.cells.set(name.clone(), closure);
                }
            }
            Statement::Call(called, args, code) => {
                let called = self.eval(called, scope)?;
                let mut args = self.arguments(args, scope)?;
                let caller = self.closure(code, scope)?;
                args.named.push(("caller".into(), caller));
                let value = self.call(called, args)?;
                self.print_string(&value)?;
            }
            Statement::Filter(filters, body) => {
                let inner = Scope::new(Some(scope));
                let (text, flow) = self.captured(|machine| machine.body(body, &inner))?;
                let value = self.filtered(text.into(), filters, &inner)?;
                self.print_string(&value)?;
                return Ok(flow);
            }
            Statement::Block(name, scoped) => {
                let around = if *scoped { scope.clone() } else { self.exported()? };
                self.block(name, &around)?;
            }
            Statement::Scope(body) => return self.body(body, &Scope::new(Some(scope))),
        }
        Ok(Flow::Next)
    }

    /// Prints a named block, which sees the variables of `scope`.
    fn block(&mut self, name: &str, scope: &Rc<Scope>) -> Outcome<()> {
        let program = self.program;
        let Some(body) = program.blocks.get(name) else {
            return Err(Fault::invalid(format!("no block is named '{name}'")));
        };
        self.body(body, &Scope::new(Some(scope))).map(|_| ())
    }

    /// The variables that the template has set so far. What it sets later is what was passed to the template.
    fn exported(&self) -> Outcome<Rc<Scope>> {
        let unset = &self.program.body.unset;
        let scope = Scope::new(None);
        let pairs = self.root.cells.pairs();
        self.budget.steps(pairs.len() as u64)?;
        for (name, value) in pairs {
            if !(value.is_undefined() && unset.contains(&name)) {
                scope.cells.set(name, value);
            }
        }
        Ok(scope)
    }

    /// The text of a named block.
    pub(super) fn block_text(&mut self, name: &str) -> Outcome<Value> {
        let (text, _) = self.captured(|machine| {
            let around = machine.exported()?;
            machine.nested(|machine| machine.block(name, &around))?;
            Ok(Flow::Next)
        })?;
        Ok(text.into())
    }

    fn filtered(&mut self, mut value: Value, filters: &[Applied], scope: &Rc<Scope>) -> Outcome<Value> {
        for Applied { name, args, line } in filters {
            let args = self.arguments(args, scope)?;
            value = self.filter(name, value, args).map_err(|fault| fault.at(*line))?;
        }
        Ok(value)
    }

    fn closure(&mut self, code: &Arc<Macro>, scope: &Rc<Scope>) -> Outcome<Value> {
        // A scope around this one that a macro refers to is kept for that macro.
        let mut around = Some(scope);
        while let Some(scope) = around {
            if scope.kept.replace(true) {
                break;
            }
            self.keep(&scope.cells)?;
            around = scope.parent.as_ref();
        }
        Ok(Value::Macro(Rc::new(Closure {
            code: code.clone(),
            scope: scope.clone(),
        })))
    }

    pub(super) fn assign(&mut self, target: &Target, value: Value, scope: &Rc<Scope>) -> Outcome<()> {
        match target {
            Target::Name(name) => {
                scope.cells.set(name.clone(), value);
                Ok(())
            }
            Target::Attribute(name, attribute) => {
                let Value::Namespace(cells) = self.variable(name, scope) else {
                    return Err(Fault::invalid(
                        "cannot assign an attribute of a value that is no namespace",
                    ));
                };
                if attribute.starts_with('_') {
                    return Err(Fault::invalid(format!("'{attribute}' begins with an underscore")));
                }
                self.outside(&value, &cells)?;
                cells.set(attribute.clone(), value);
                Ok(())
            }
            Target::Tuple(targets) => {
                let values = self.items(&value)?;
                if values.len() != targets.len() {
                    let (expected, found) = (targets.len(), values.len());
                    return Err(Fault::invalid(format!(
                        "expected {expected} values to unpack, found {found}"
                    )));
                }
                let mut pairs = targets.iter().zip(values);
                pairs.try_for_each(|(target, value)| self.assign(target, value, scope))
            }
        }
    }

    /// Fails if `value` contains the namespace: it would contain itself.
    pub(super) fn outside(&mut self, value: &Value, namespace: &Rc<Cells>) -> Outcome<()> {
        self.budget.steps(1)?;
        match value {
            Value::Namespace(found) if Rc::ptr_eq(found, namespace) => {
                Err(Fault::invalid("a namespace cannot contain itself"))
            }
            Value::Namespace(found) => self.nested(|machine| {
                let mut pairs = found.pairs().into_iter();
                pairs.try_for_each(|(_, value)| machine.outside(&value, namespace))
            }),
            Value::List(seq) | Value::Tuple(seq) => seq.items.iter().try_for_each(|item| self.outside(item, namespace)),
            Value::Dict(dict) => dict.map.values().try_for_each(|item| self.outside(item, namespace)),
            _ => Ok(()),
        }
    }

    /// The text of a recursive loop over other items.
    pub(super) fn recurse(&mut self, state: &LoopState, items: &Value) -> Outcome<Value> {
        if !state.code.recursive {
            return Err(Fault::invalid(
                "the loop must have the 'recursive' marker to be called recursively",
            ));
        }
        let (text, _) = self.captured(|machine| {
            machine.nested(|machine| machine.iterate(&state.code, &state.scope, items, state.depth0 + 1))
        })?;
        Ok(text.into())
    }

    fn iterate(&mut self, code: &Arc<Loop>, scope: &Rc<Scope>, items: &Value, depth0: i128) -> Outcome<Flow> {
        let length = match (items, &code.test) {
            (Value::Iter(_), _) | (_, Some(_)) => None,
            _ => items.len().map(|length| length as i128),
        };
        let source = match items {
            Value::Iter(pending) => Source::Shared(pending.clone()),
            _ => Source::Items(self.items(items)?.into_iter()),
        };
        let state = Rc::new(LoopState {
            code: code.clone(),
            scope: scope.clone(),
            source: RefCell::new(source),
            depth: items.depth(),
            depth0,
            index0: Cell::new(-1),
            length: Cell::new(length),
            previous: RefCell::new(None),
            current: RefCell::new(None),
            after: RefCell::new(None),
            changed: RefCell::new(None),
        });
        let mut completed = false;
        loop {
            let known = state.after.borrow_mut().take();
            let next = match known {
                Some(item) => Some(item),
                None => self.pull(&state)?,
            };
            let Some(item) = next else { break };
            self.budget.steps(1)?;
            state.index0.set(state.index0.get() + 1);
            *state.previous.borrow_mut() = state.current.replace(Some(item.clone()));
            let inner = Scope::new(Some(scope));
            inner.cells.set("loop".into(), Value::Loop(state.clone()));
            self.assign(&code.target, item, &inner)?;
            match self.body(&code.body, &inner)? {
                Flow::Next => completed = true,
                Flow::Break => break,
                Flow::Continue => {}
            }
        }
        match completed {
            true => Ok(Flow::Next),
            // In Jinja, an iteration that `break` or `continue` ended does not count.
            false => self.body(&code.otherwise, &Scope::new(Some(scope))),
        }
    }

    /// The next item of a loop that its test allows.
    fn pull(&mut self, state: &LoopState) -> Outcome<Option<Value>> {
        loop {
            let item = match &mut *state.source.borrow_mut() {
                Source::Items(items) => items.next(),
                Source::Passed(items) => return Ok(items.next()),
                Source::Shared(pending) => pending.try_borrow_mut().map_err(|_| busy())?.next()?,
            };
            let (Some(item), Some(test)) = (&item, &state.code.test) else {
                return Ok(item);
            };
            self.budget.steps(1)?;
            let inner = Scope::new(Some(&state.scope));
            self.assign(&state.code.target, item.clone(), &inner)?;
            if self.eval(test, &inner)?.truth() {
                return Ok(Some(item.clone()));
            }
        }
    }

    /// The next item of a loop, which stays its next item.
    pub(super) fn look_ahead(&mut self, state: &LoopState) -> Outcome<Option<Value>> {
        if state.after.borrow().is_none() {
            let next = self.pull(state)?;
            *state.after.borrow_mut() = next;
        }
        Ok(state.after.borrow().clone())
    }

    /// The number of items of a loop. All that are left are read for it.
    pub(super) fn loop_length(&mut self, state: &LoopState) -> Outcome<i128> {
        if let Some(length) = state.length.get() {
            return Ok(length);
        }
        let mut rest = Vec::new();
        while let Some(item) = self.pull(state)? {
            rest.push(item);
        }
        let ahead = i128::from(state.after.borrow().is_some());
        let length = rest.len() as i128 + state.index0.get() + 1 + ahead;
        // They have passed the test already.
        *state.source.borrow_mut() = Source::Passed(rest.into_iter());
        state.length.set(Some(length));
        Ok(length)
    }

    /// Calls a macro.
    pub(super) fn call_macro(&mut self, closure: &Closure, mut args: Arguments) -> Outcome<Value> {
        let code = &*closure.code;
        let name = code.name.as_deref().unwrap_or("caller");
        let inner = Scope::new(Some(&closure.scope));
        let mut positional = args.positional.into_iter();
        let first_default = code.parameters.len() - code.defaults.len();
        let mut missing = Vec::new();
        args.positional = Vec::new();
        for (at, parameter) in code.parameters.iter().enumerate() {
            let value = positional.next().or_else(|| args.take(parameter));
            match value {
                Some(value) => inner.cells.set(parameter.clone(), value),
                None => missing.push((at, parameter)),
            }
        }
        let rest: Vec<Value> = positional.collect();
        if code.caller {
            let undefined = || Value::undefined("No caller defined");
            let caller = args.take("caller").unwrap_or_else(undefined);
            inner.cells.set("caller".into(), caller);
        }
        if code.kwargs {
            let map = args.named.into_iter().map(|(name, value)| (name.into(), value));
            inner.cells.set("kwargs".into(), Value::dict(map.collect())?);
        } else if let Some((given, _)) = args.named.first() {
            return Err(Fault::invalid(format!(
                "macro '{name}' takes no keyword argument '{given}'"
            )));
        }
        if code.varargs {
            inner.cells.set("varargs".into(), Value::tuple(rest)?);
        } else if !rest.is_empty() {
            let expected = code.parameters.len();
            return Err(Fault::invalid(format!(
                "macro '{name}' takes not more than {expected} argument(s)"
            )));
        }
        let undefined = |parameter| Value::undefined(format!("parameter '{parameter}' was not provided"));
        for (_, parameter) in &missing {
            inner.cells.set((*parameter).clone(), undefined(*parameter));
        }
        for (at, parameter) in missing {
            let value = match at.checked_sub(first_default).and_then(|at| code.defaults.get(at)) {
                Some(default) => self.eval(default, &inner)?,
                None => undefined(parameter),
            };
            inner.cells.set(parameter.clone(), value);
        }
        let (text, _) = self.captured(|machine| machine.nested(|machine| machine.body(&code.body, &inner)))?;
        Ok(text.into())
    }

    /// The value of a variable.
    pub(super) fn variable(&self, name: &Arc<str>, scope: &Rc<Scope>) -> Value {
        let mut around = Some(scope);
        while let Some(scope) = around {
            if let Some(value) = scope.cells.get(name) {
                return value;
            }
            around = scope.parent.as_ref();
        }
        let global = self.globals.get(name);
        global
            .cloned()
            .unwrap_or_else(|| Value::undefined(format!("'{name}' is undefined")))
    }

    /// A key of a dictionary, see [`Key::new`].
    pub(super) fn key_of(&self, value: Value) -> Outcome<Key> {
        self.budget.steps(value.weight() / 8)?;
        Key::new(value)
    }

    /// Uses what reading all of a text costs.
    pub(super) fn charge(&self, text: &str) -> Outcome<()> {
        self.budget.bytes(text.len() as u64 / 8 + 1)
    }

    /// The number of characters of a text.
    pub(super) fn count(&self, text: &str) -> Outcome<usize> {
        self.charge(text)?;
        Ok(count(text))
    }
}

/// The error that an iterator is used while it is used.
pub(super) fn busy() -> Box<Fault> {
    Fault::invalid("generator already executing")
}
