//! A parsed template.

use std::collections::BTreeMap;
use std::sync::Arc;

/// A whole template.
#[derive(Debug, Default)]
pub(super) struct Program {
    pub(super) body: Body,
    /// The bodies of `block` tags, which are attributes of `self`.
    pub(super) blocks: BTreeMap<Arc<str>, Body>,
}

/// Statements that share a scope.
#[derive(Debug, Default)]
pub(super) struct Body {
    pub(super) nodes: Vec<Node>,
    /// Variables that are undefined when the scope begins, although variables of these names exist around it, because
    /// the scope sets them before it reads them.
    pub(super) unset: Vec<Arc<str>>,
}

/// A statement with the line of its tag.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: u32,
    pub(super) kind: Statement,
}

#[derive(Debug)]
pub(super) enum Statement {
    /// Text outside of tags.
    Text(String),
    /// `{{ value }}`, and `{% print value, value %}`.
    Print(Expr),
    Set(Target, Expr),
    /// `set` with a body. The filters are applied from left to right.
    SetBlock(Target, Vec<Applied>, Body),
    /// The branches with their conditions, and `else`.
    If(Vec<(Expr, Vec<Node>)>, Vec<Node>),
    For(Arc<Loop>),
    With(Vec<(Target, Expr)>, Body),
    Macro(Arc<Macro>),
    /// `call`: the called macro, its arguments, and the body as a macro.
    Call(Expr, Args, Arc<Macro>),
    Filter(Vec<Applied>, Body),
    /// A named block. With `true` it sees the variables around it, not only those of the template.
    Block(Arc<str>, bool),
    /// A part of the template with a scope of its own.
    Scope(Body),
    Break,
    Continue,
}

/// A filter without its value.
#[derive(Debug)]
pub(super) struct Applied {
    pub(super) name: Arc<str>,
    pub(super) args: Args,
    pub(super) line: u32,
}

/// What is assigned to.
#[derive(Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    /// An attribute of a namespace.
    Attribute(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(super) struct Loop {
    pub(super) target: Target,
    pub(super) items: Expr,
    /// Only items for which this holds.
    pub(super) test: Option<Expr>,
    pub(super) recursive: bool,
    pub(super) body: Body,
    pub(super) otherwise: Body,
}

#[derive(Debug)]
pub(super) struct Macro {
    /// None for the body of a `call` block.
    pub(super) name: Option<Arc<str>>,
    /// The defaults belong to the last parameters.
    pub(super) parameters: Vec<Arc<str>>,
    pub(super) defaults: Vec<Expr>,
    pub(super) body: Body,
    /// Whether the body uses these, which decides which arguments are allowed.
    pub(super) caller: bool,
    pub(super) varargs: bool,
    pub(super) kwargs: bool,
}

/// The arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Args {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(Arc<str>, Expr)>,
    /// `*list`
    pub(super) more: Option<Box<Expr>>,
    /// `**dictionary`
    pub(super) more_named: Option<Box<Expr>>,
}

#[derive(Debug)]
pub(super) struct Expr {
    pub(super) line: u32,
    /// Levels of expressions in it.
    pub(super) height: u32,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(Arc<str>),
    Tuple(Vec<Expr>),
    List(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Not(Box<Expr>),
    /// `-x` and `+x`.
    Sign(bool, Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Binary(Binary, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    /// `value if condition else other`
    Choice(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
    Attribute(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, [Option<Box<Expr>>; 3]),
    Call(Box<Expr>, Box<Args>),
    /// None is the value that a `filter` tag or a `set` block passes.
    Filter(Box<Expr>, Box<Applied>),
    Test(Box<Expr>, Box<Applied>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
    NotIn,
}
