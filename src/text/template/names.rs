//! Which variables of a scope are undefined until it sets them, and whether filters and tests exist.
//!
//! Jinja decides where a variable lives when it compiles a template. A scope that sets a variable before it reads it has
//! its own from the beginning, which hides a variable of the same name that was passed to the template.

use super::ast::{Applied, Args, Body, Expr, Kind, Loop, Macro, Node, Program, Statement, Target};
use super::limits::{Fault, Outcome};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Whether a filter (or a test, if the second argument is true) of a name exists.
pub(super) type Known = fn(&str, bool) -> bool;

/// Most names that are copied for the branches of `if`, which bounds the time for templates with many names.
const MAX_COPIES: usize = 400_000;

/// Fills [`Body::unset`] everywhere. Fails for an unknown filter or test, except in `if`, where Jinja looks when it is
/// used.
pub(super) fn resolve(program: &mut Program, known: Known) -> Outcome<()> {
    let copies = Cell::new(0);
    let mut frame = Frame::new(None, known, &copies);
    frame.nodes(&mut program.body.nodes)?;
    program.body.unset = frame.unset();
    for body in program.blocks.values_mut() {
        let mut frame = Frame::new(None, known, &copies);
        frame.nodes(&mut body.nodes)?;
        body.unset = frame.unset();
    }
    Ok(())
}

/// What a variable of a scope is when the scope begins.
#[derive(Clone, Copy, PartialEq)]
enum Load {
    /// That of the scope around it, or of the caller.
    Outer,
    Undefined,
}

/// The variables of a scope.
struct Frame<'a> {
    parent: Option<&'a Frame<'a>>,
    names: BTreeMap<Arc<str>, Load>,
    stores: BTreeSet<Arc<str>>,
    /// Inside of `if`.
    soft: bool,
    known: Known,
    copies: &'a Cell<usize>,
}

impl<'a> Frame<'a> {
    fn new(parent: Option<&'a Frame<'a>>, known: Known, copies: &'a Cell<usize>) -> Frame<'a> {
        Frame {
            parent,
            names: BTreeMap::new(),
            stores: BTreeSet::new(),
            soft: false,
            known,
            copies,
        }
    }

    fn unset(self) -> Vec<Arc<str>> {
        let undefined = self.names.into_iter().filter(|(_, load)| *load == Load::Undefined);
        undefined.map(|(name, _)| name).collect()
    }

    fn finds(&self, name: &str) -> bool {
        self.names.contains_key(name) || self.parent.is_some_and(|parent| parent.finds(name))
    }

    fn load(&mut self, name: &Arc<str>) {
        if !self.finds(name) {
            self.names.insert(name.clone(), Load::Outer);
        }
    }

    fn store(&mut self, name: &Arc<str>) {
        self.stores.insert(name.clone());
        if !self.names.contains_key(name) {
            let outer = self.parent.is_some_and(|parent| parent.finds(name));
            let load = if outer { Load::Outer } else { Load::Undefined };
            self.names.insert(name.clone(), load);
        }
    }

    fn parameter(&mut self, name: &Arc<str>) {
        self.stores.insert(name.clone());
        self.names.insert(name.clone(), Load::Outer);
    }

    fn target(&mut self, target: &Target, note: fn(&mut Self, &Arc<str>)) {
        match target {
            Target::Name(name) => note(self, name),
            Target::Attribute(name, _) => self.load(name),
            Target::Tuple(targets) => targets.iter().for_each(|target| self.target(target, note)),
        }
    }

    /// A copy for a branch of `if`.
    fn branch(&self) -> Outcome<Frame<'a>> {
        self.copies.set(self.copies.get() + self.names.len());
        if self.copies.get() > MAX_COPIES {
            return Err(Fault::new("limit", "the template has too many variables and branches"));
        }
        Ok(Frame {
            names: self.names.clone(),
            stores: self.stores.clone(),
            soft: true,
            ..*self
        })
    }

    /// Takes over what the branches of an `if` set: it may be set or not.
    fn join(&mut self, branches: Vec<Frame>) {
        let stores: BTreeSet<Arc<str>> = branches.iter().flat_map(|branch| branch.stores.clone()).collect();
        let new: Vec<Arc<str>> = stores.difference(&self.stores).cloned().collect();
        for branch in branches {
            self.names.extend(branch.names);
        }
        self.stores.extend(stores);
        self.names.extend(new.into_iter().map(|name| (name, Load::Outer)));
    }

    fn inner(&self, body: &mut Body, prepare: impl FnOnce(&mut Frame) -> Outcome<()>) -> Outcome<()> {
        let mut frame = Frame::new(Some(self), self.known, self.copies);
        prepare(&mut frame)?;
        frame.nodes(&mut body.nodes)?;
        body.unset = frame.unset();
        Ok(())
    }

    fn nodes(&mut self, nodes: &mut [Node]) -> Outcome<()> {
        nodes.iter_mut().try_for_each(|node| self.node(node))
    }

    fn node(&mut self, node: &mut Node) -> Outcome<()> {
        match &mut node.kind {
            Statement::Text(_) | Statement::Break | Statement::Continue => Ok(()),
            Statement::Print(value) => self.expr(value),
            Statement::Set(target, value) => {
                self.expr(value)?;
                self.target(target, Frame::store);
                Ok(())
            }
            Statement::SetBlock(target, filters, body) => {
                self.target(target, Frame::store);
                self.filters(filters)?;
                self.inner(body, |_| Ok(()))
            }
            Statement::If(branches, otherwise) => self.branches(branches, otherwise),
            Statement::For(code) => self.repeat(unique(code)?),
            Statement::With(pairs, body) => {
                for (_, value) in &*pairs {
                    self.expr(value)?;
                }
                self.inner(body, |frame| {
                    pairs
                        .iter()
                        .for_each(|(target, _)| frame.target(target, Frame::parameter));
                    Ok(())
                })
            }
            Statement::Macro(code) => {
                if let Some(name) = &code.name {
                    self.store(name);
                }
                self.closure(unique(code)?)
            }
            Statement::Call(called, args, code) => {
                self.expr(called)?;
                self.args(args)?;
                self.closure(unique(code)?)
            }
            Statement::Filter(filters, body) => {
                self.filters(filters)?;
                self.inner(body, |_| Ok(()))
            }
            Statement::Scope(body) => self.inner(body, |_| Ok(())),
            // A block is no part of the scope around it.
            Statement::Block(..) => Ok(()),
        }
    }

    fn branches(&mut self, branches: &mut [(Expr, Vec<Node>)], otherwise: &mut [Node]) -> Outcome<()> {
        let soft = std::mem::replace(&mut self.soft, true);
        let Some(((test, nodes), elifs)) = branches.split_first_mut() else {
            return Ok(());
        };
        self.expr(test)?;
        let mut body = self.branch()?;
        body.nodes(nodes)?;
        let mut others = self.branch()?;
        for elif in elifs {
            others.branches(std::slice::from_mut(elif), &mut [])?;
        }
        let mut last = self.branch()?;
        last.nodes(otherwise)?;
        self.join(vec![body, others, last]);
        self.soft = soft;
        Ok(())
    }

    fn repeat(&mut self, code: &mut Loop) -> Outcome<()> {
        self.expr(&code.items)?;
        let target = &code.target;
        self.inner(&mut code.body, |frame| {
            frame.parameter(&"loop".into());
            frame.target(target, Frame::parameter);
            Ok(())
        })?;
        let mut test = Frame::new(Some(self), self.known, self.copies);
        test.target(target, Frame::parameter);
        code.test.iter().try_for_each(|condition| test.expr(condition))?;
        self.inner(&mut code.otherwise, |_| Ok(()))
    }

    fn closure(&mut self, code: &mut Macro) -> Outcome<()> {
        self.inner(&mut code.body, |frame| {
            code.parameters.iter().for_each(|name| frame.parameter(name));
            let special = [
                (code.caller, "caller"),
                (code.varargs, "varargs"),
                (code.kwargs, "kwargs"),
            ];
            for (_, name) in special.into_iter().filter(|(used, _)| *used) {
                frame.parameter(&name.into());
            }
            code.defaults.iter().try_for_each(|value| frame.expr(value))
        })
    }

    fn filters(&mut self, filters: &[Applied]) -> Outcome<()> {
        filters.iter().try_for_each(|applied| self.applied(applied, false))
    }

    fn applied(&mut self, applied: &Applied, test: bool) -> Outcome<()> {
        let Applied { name, args, line } = applied;
        if !self.soft && !(self.known)(name, test) {
            let class = if test { "unknown test" } else { "unknown filter" };
            return Err(Fault::new(class, format!("no such name: '{name}'")).at(*line));
        }
        self.args(args)
    }

    fn args(&mut self, args: &Args) -> Outcome<()> {
        let named = args.named.iter().map(|(_, value)| value);
        let more = args.more.iter().chain(&args.more_named).map(|value| &**value);
        let mut all = args.positional.iter().chain(named).chain(more);
        all.try_for_each(|value| self.expr(value))
    }

    fn expr(&mut self, expr: &Expr) -> Outcome<()> {
        match &expr.kind {
            Kind::None | Kind::Bool(_) | Kind::Int(_) | Kind::Float(_) | Kind::Str(_) => Ok(()),
            Kind::Name(name) => {
                self.load(name);
                Ok(())
            }
            Kind::Tuple(items) | Kind::List(items) | Kind::Concat(items) => {
                items.iter().try_for_each(|item| self.expr(item))
            }
            Kind::Dict(items) => items.iter().try_for_each(|(key, value)| {
                self.expr(key)?;
                self.expr(value)
            }),
            Kind::Not(a) | Kind::Sign(_, a) | Kind::Attribute(a, _) => self.expr(a),
            Kind::And(a, b) | Kind::Or(a, b) | Kind::Binary(_, a, b) | Kind::Item(a, b) => {
                self.expr(a)?;
                self.expr(b)
            }
            Kind::Compare(a, rest) => {
                self.expr(a)?;
                rest.iter().try_for_each(|(_, b)| self.expr(b))
            }
            Kind::Choice(a, b, c) => {
                let soft = std::mem::replace(&mut self.soft, true);
                self.expr(a)?;
                self.expr(b)?;
                c.iter().try_for_each(|c| self.expr(c))?;
                self.soft = soft;
                Ok(())
            }
            Kind::Slice(a, bounds) => {
                self.expr(a)?;
                bounds.iter().flatten().try_for_each(|b| self.expr(b))
            }
            Kind::Call(a, args) => {
                self.expr(a)?;
                self.args(args)
            }
            Kind::Filter(a, applied) => {
                self.expr(a)?;
                self.applied(applied, false)
            }
            Kind::Test(a, applied) => {
                self.expr(a)?;
                self.applied(applied, true)
            }
        }
    }
}

/// The code of a loop or macro, which nothing else refers to before the template is complete.
fn unique<T>(code: &mut Arc<T>) -> Outcome<&mut T> {
    Arc::get_mut(code).ok_or_else(|| Fault::new("internal error", "a part of the template is shared too early"))
}
