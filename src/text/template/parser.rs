//! Parses the statements of a template. The grammar is that of Jinja 3.1.

use super::ast::{Applied, Args, Body, Expr, Kind, Loop, Macro, Node, Program, Statement, Target};
use super::lexer::{Lexeme, Token};
use super::limits::{Fault, Outcome};
use std::sync::Arc;

/// Deepest nesting of blocks, and of brackets and operators in an expression.
const MAX_DEPTH: u32 = 120;
/// Deepest nesting of the operators of an expression.
const MAX_HEIGHT: u32 = 500;
/// Most parameters of a macro, and most named arguments of a call.
pub(super) const MAX_ARGUMENTS: usize = 255;
/// Most branches of an `if`.
const MAX_BRANCHES: usize = 1_000;
/// The variables that a macro has only if it uses them.
const SPECIAL: [&str; 3] = ["caller", "varargs", "kwargs"];

/// Parses the tokens of a template.
pub(super) fn parse(tokens: Vec<Token>) -> Outcome<Program> {
    let mut parser = Parser {
        tokens,
        at: 0,
        depth: 0,
        loops: 0,
        macros: Vec::new(),
        program: Program::default(),
    };
    let nodes = parser.nodes(&[])?.0;
    let mut program = parser.program;
    program.body.nodes = nodes;
    Ok(program)
}

pub(super) struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: u32,
    /// Loops around the statement, inside of its macro.
    loops: u32,
    /// For each macro around the statement and each of [`SPECIAL`]: whether the name still has its special meaning, and
    /// whether it was read.
    macros: Vec<[(bool, bool); 3]>,
    program: Program,
}

pub(super) fn syntax(message: impl Into<String>) -> Box<Fault> {
    Fault::new("syntax error", message)
}

impl Parser {
    pub(super) fn peek(&self) -> &Lexeme {
        &self.tokens[self.at].kind
    }

    pub(super) fn peek_second(&self) -> &Lexeme {
        let second = self.tokens.get(self.at + 1);
        second.map_or(&Lexeme::End, |token| &token.kind)
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens[self.at].line
    }

    /// Moves to the next token. The last one is never passed.
    pub(super) fn skip(&mut self) {
        self.at = (self.at + 1).min(self.tokens.len() - 1);
    }

    pub(super) fn is_op(&self, op: &str) -> bool {
        matches!(self.peek(), Lexeme::Op(found) if *found == op)
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Lexeme::Name(found) if **found == *name)
    }

    /// Skips the operator if it is next.
    pub(super) fn eat(&mut self, op: &str) -> bool {
        let found = self.is_op(op);
        if found {
            self.skip();
        }
        found
    }

    /// Skips the name if it is next.
    pub(super) fn eat_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.skip();
        }
        found
    }

    pub(super) fn require(&mut self, op: &str) -> Outcome<()> {
        match self.eat(op) {
            true => Ok(()),
            false => Err(self.unexpected(&format!("'{op}'"))),
        }
    }

    pub(super) fn name(&mut self) -> Outcome<Arc<str>> {
        let Lexeme::Name(name) = self.peek() else {
            return Err(self.unexpected("a name"));
        };
        let name = name.clone();
        self.skip();
        Ok(name)
    }

    /// The error that something else than the next token is needed.
    pub(super) fn unexpected(&self, expected: &str) -> Box<Fault> {
        let found = match self.peek() {
            Lexeme::Text(_) => "text".to_string(),
            Lexeme::PrintBegin => "'{{'".to_string(),
            Lexeme::PrintEnd => "'}}'".to_string(),
            Lexeme::TagBegin => "'{%'".to_string(),
            Lexeme::TagEnd => "'%}'".to_string(),
            Lexeme::Name(name) => format!("'{name}'"),
            Lexeme::Str(text) => format!("'{text}'"),
            Lexeme::Int(number) => number.to_string(),
            Lexeme::Float(number) => number.to_string(),
            Lexeme::Op(op) => format!("'{op}'"),
            Lexeme::End => "the end of the template".to_string(),
        };
        syntax(format!("expected {expected}, found {found}")).at(self.line())
    }

    /// Runs `parse` one level deeper.
    pub(super) fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Outcome<T>) -> Outcome<T> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            let message = format!("nested too deeply, expected at most {MAX_DEPTH} levels");
            return Err(syntax(message).at(self.line()));
        }
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    /// An expression, whose height is limited.
    pub(super) fn expr(&self, line: u32, kind: Kind) -> Outcome<Expr> {
        let height = 1 + height(&kind);
        if height > MAX_HEIGHT {
            let message = format!("an expression is nested too deeply, expected at most {MAX_HEIGHT} levels");
            return Err(syntax(message).at(line));
        }
        Ok(Expr { line, height, kind })
    }

    /// Notes that a variable is read.
    pub(super) fn read(&mut self, name: &str) {
        self.special(name, |(special, read)| *read |= *special);
    }

    /// Notes that a variable is set.
    fn write(&mut self, name: &str) {
        self.special(name, |(special, _)| *special = false);
    }

    fn special(&mut self, name: &str, note: impl Fn(&mut (bool, bool))) {
        if let Some(which) = SPECIAL.iter().position(|special| *special == name) {
            self.macros.iter_mut().for_each(|names| note(&mut names[which]));
        }
    }

    /// Statements up to a tag named by one of `ends`, whose name is skipped and returned, or to the end of the template.
    fn nodes(&mut self, ends: &[&str]) -> Outcome<(Vec<Node>, String)> {
        let mut nodes = Vec::new();
        loop {
            let line = self.line();
            match self.peek().clone() {
                Lexeme::Text(text) => {
                    self.skip();
                    let kind = Statement::Text(text);
                    nodes.push(Node { line, kind });
                }
                Lexeme::PrintBegin => {
                    self.skip();
                    let kind = Statement::Print(self.tuple(true, &[])?);
                    if *self.peek() != Lexeme::PrintEnd {
                        return Err(self.unexpected("'}}'"));
                    }
                    self.skip();
                    nodes.push(Node { line, kind });
                }
                Lexeme::TagBegin => {
                    self.skip();
                    let line = self.line();
                    let name = self.name()?;
                    if ends.contains(&&*name) {
                        return Ok((nodes, name.to_string()));
                    }
                    let kinds = self.nested(|parser| parser.statement(&name, ends))?;
                    self.tag_end()?;
                    nodes.extend(kinds.into_iter().map(|kind| Node { line, kind }));
                }
                Lexeme::End if ends.is_empty() => return Ok((nodes, String::new())),
                _ => return Err(self.unexpected(&format!("a tag {}", ends.join(" or ")))),
            }
        }
    }

    fn tag_end(&mut self) -> Outcome<()> {
        if *self.peek() != Lexeme::TagEnd {
            return Err(self.unexpected("'%}'"));
        }
        self.skip();
        Ok(())
    }

    /// The statements of a block that begins with the end of its tag. A colon may stand before that.
    fn block(&mut self, ends: &[&str]) -> Outcome<(Vec<Node>, String)> {
        self.eat(":");
        self.tag_end()?;
        self.nodes(ends)
    }

    fn body(&mut self, end: &str) -> Outcome<Body> {
        let nodes = self.block(&[end])?.0;
        Ok(Body {
            nodes,
            unset: Vec::new(),
        })
    }

    /// As [`Parser::body`], where `break` and `continue` have no loop.
    fn closed_body(&mut self, end: &str) -> Outcome<Body> {
        let loops = std::mem::take(&mut self.loops);
        let body = self.body(end);
        self.loops = loops;
        body
    }

    fn statement(&mut self, name: &str, ends: &[&str]) -> Outcome<Vec<Statement>> {
        let line = self.line();
        let only = |statement| Ok(vec![statement]);
        match name {
            "for" => only(self.parse_for()?),
            "if" => only(self.parse_if()?),
            "set" => only(self.parse_set()?),
            "with" => only(self.parse_with()?),
            "macro" => {
                let name = self.name()?;
                self.write(&name);
                let (parameters, defaults) = self.signature()?;
                let body = self.macro_body(Some(name), parameters, defaults, "endmacro")?;
                only(Statement::Macro(Arc::new(body)))
            }
            "call" => only(self.parse_call_block()?),
            "filter" => {
                let applied = self.filters(true)?;
                only(Statement::Filter(applied, self.body("endfilter")?))
            }
            "block" => only(self.parse_block()?),
            "generation" => only(Statement::Scope(self.parse_generation(line)?)),
            "autoescape" => {
                let Kind::Bool(false) = self.expression()?.kind else {
                    return Err(syntax("'autoescape' is supported with 'false' only").at(line));
                };
                only(Statement::Scope(self.body("endautoescape")?))
            }
            "print" => {
                let mut values = Vec::new();
                while *self.peek() != Lexeme::TagEnd {
                    if !values.is_empty() {
                        self.require(",")?;
                    }
                    values.push(Statement::Print(self.expression()?));
                }
                Ok(values)
            }
            "break" | "continue" if self.loops == 0 => Err(syntax(format!("'{name}' is outside of a loop")).at(line)),
            "break" => only(Statement::Break),
            "continue" => only(Statement::Continue),
            "include" | "import" | "from" | "extends" => {
                let message = format!("'{name}' is not allowed: a chat template cannot load other templates");
                Err(Fault::new("syntax error", message).at(line))
            }
            _ if ends.is_empty() => Err(syntax(format!("unknown tag '{name}'")).at(line)),
            _ => Err(syntax(format!("unknown tag '{name}', expected {}", ends.join(" or "))).at(line)),
        }
    }

    fn parse_generation(&mut self, line: u32) -> Outcome<Body> {
        let at_end = *self.peek() == Lexeme::TagEnd || self.is_op(":");
        if !at_end {
            let found = self.unexpected("");
            let Fault::Failed { message, .. } = *found else {
                return Err(found);
            };
            let message = message.replace("expected , ", "");
            return Err(Fault::new("'generation' takes no arguments", message).at(line));
        }
        self.body("endgeneration")
    }

    fn parse_if(&mut self) -> Outcome<Statement> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false, &[])?;
            let (nodes, end) = self.block(&["elif", "else", "endif"])?;
            branches.push((test, nodes));
            if branches.len() > MAX_BRANCHES {
                let message = format!("an 'if' has more than {MAX_BRANCHES} branches");
                return Err(syntax(message).at(self.line()));
            }
            match &end[..] {
                "elif" => {}
                "else" => return Ok(Statement::If(branches, self.block(&["endif"])?.0)),
                _ => return Ok(Statement::If(branches, Vec::new())),
            }
        }
    }

    fn parse_for(&mut self) -> Outcome<Statement> {
        let target = self.target(false, &["in"])?;
        if !self.eat_name("in") {
            return Err(self.unexpected("'in'"));
        }
        let items = self.tuple(false, &["recursive"])?;
        let test = match self.eat_name("if") {
            true => Some(self.expression()?),
            false => None,
        };
        let recursive = self.eat_name("recursive");
        self.loops += 1;
        let block = self.block(&["endfor", "else"]);
        self.loops -= 1;
        let (nodes, end) = block?;
        let otherwise = match &end[..] {
            "else" => self.body("endfor")?,
            _ => Body::default(),
        };
        Ok(Statement::For(Arc::new(Loop {
            target,
            items,
            test,
            recursive,
            body: Body {
                nodes,
                unset: Vec::new(),
            },
            otherwise,
        })))
    }

    fn parse_set(&mut self) -> Outcome<Statement> {
        let target = self.target(true, &[])?;
        if self.eat("=") {
            return Ok(Statement::Set(target, self.tuple(true, &[])?));
        }
        let filters = self.filters(false)?;
        Ok(Statement::SetBlock(target, filters, self.body("endset")?))
    }

    fn parse_with(&mut self) -> Outcome<Statement> {
        let mut pairs = Vec::new();
        while *self.peek() != Lexeme::TagEnd && !self.is_op(":") {
            if !pairs.is_empty() {
                self.require(",")?;
            }
            let target = self.target(false, &[])?;
            self.require("=")?;
            pairs.push((target, self.expression()?));
        }
        Ok(Statement::With(pairs, self.body("endwith")?))
    }

    fn macro_body(
        &mut self,
        name: Option<Arc<str>>,
        parameters: Vec<Arc<str>>,
        defaults: Vec<Expr>,
        end: &str,
    ) -> Outcome<Macro> {
        let line = self.line();
        self.macros.push([(true, false); 3]);
        let body = self.closed_body(end);
        let [caller, varargs, kwargs] = self.macros.pop().unwrap_or_default().map(|(_, read)| read);
        let body = body?;
        let position = |name: &str| parameters.iter().position(|parameter| **parameter == *name);
        if let Some(at) = position("caller").filter(|_| caller)
            && at < parameters.len() - defaults.len()
        {
            let message = "the special argument 'caller' of a macro must be omitted or have a default";
            return Err(syntax(message).at(line));
        }
        Ok(Macro {
            caller: caller && position("caller").is_none(),
            varargs: varargs && position("varargs").is_none(),
            kwargs: kwargs && position("kwargs").is_none(),
            name,
            parameters,
            defaults,
            body,
        })
    }

    fn signature(&mut self) -> Outcome<(Vec<Arc<str>>, Vec<Expr>)> {
        let (mut parameters, mut defaults) = (Vec::new(), Vec::new());
        self.require("(")?;
        while !self.is_op(")") {
            if !parameters.is_empty() {
                self.require(",")?;
            }
            let name = self.name()?;
            self.write(&name);
            if parameters.len() >= MAX_ARGUMENTS || parameters.contains(&name) {
                let message = format!("the parameter '{name}' appears twice or after {MAX_ARGUMENTS} others");
                return Err(syntax(message).at(self.line()));
            }
            if self.eat("=") {
                defaults.push(self.expression()?);
            } else if !defaults.is_empty() {
                let message = "a parameter without a default follows one with a default";
                return Err(syntax(message).at(self.line()));
            }
            parameters.push(name);
        }
        self.skip();
        Ok((parameters, defaults))
    }

    fn parse_call_block(&mut self) -> Outcome<Statement> {
        let line = self.line();
        let (parameters, defaults) = match self.is_op("(") {
            true => self.signature()?,
            false => Default::default(),
        };
        let Kind::Call(called, args) = self.expression()?.kind else {
            return Err(syntax("'call' expects a call").at(line));
        };
        let body = self.macro_body(None, parameters, defaults, "endcall")?;
        Ok(Statement::Call(*called, *args, Arc::new(body)))
    }

    fn parse_block(&mut self) -> Outcome<Statement> {
        let line = self.line();
        let name = self.name()?;
        let scoped = self.eat_name("scoped");
        self.eat_name("required");
        let body = self.closed_body("endblock")?;
        self.eat_name(&name);
        if self.program.blocks.insert(name.clone(), body).is_some() {
            return Err(syntax(format!("the block '{name}' is defined twice")).at(line));
        }
        Ok(Statement::Block(name, scoped))
    }

    /// What `set`, `for` and `with` assign to: `name`, `name, name`, and `namespace.name` if `attributes`.
    fn target(&mut self, attributes: bool, ends: &[&str]) -> Outcome<Target> {
        let mut targets = Vec::new();
        let mut tuple = false;
        loop {
            let end = matches!(self.peek(), Lexeme::TagEnd | Lexeme::PrintEnd) || self.is_op(")");
            if end || ends.iter().any(|end| self.is_name(end)) {
                break;
            }
            targets.push(self.one_target(attributes)?);
            if !self.eat(",") {
                break;
            }
            tuple = true;
        }
        match targets.len() {
            0 => Err(self.unexpected("a name to assign to")),
            1 if !tuple => Ok(targets.remove(0)),
            _ => Ok(Target::Tuple(targets)),
        }
    }

    fn one_target(&mut self, attributes: bool) -> Outcome<Target> {
        if self.eat("(") {
            let target = self.nested(|parser| parser.target(false, &[]))?;
            self.require(")")?;
            return Ok(target);
        }
        let line = self.line();
        let name = self.name()?;
        if attributes && self.eat(".") {
            return Ok(Target::Attribute(name, self.name()?));
        }
        if let "true" | "false" | "none" | "True" | "False" | "None" = &*name {
            return Err(syntax(format!("cannot assign to '{name}'")).at(line));
        }
        if *name == *"loop" && self.loops > 0 {
            return Err(syntax("cannot assign to the special variable 'loop'").at(line));
        }
        self.write(&name);
        Ok(Target::Name(name))
    }

    /// Filters, each after a `|`; the first one without if `inline`.
    pub(super) fn filters(&mut self, inline: bool) -> Outcome<Vec<Applied>> {
        let mut found = Vec::new();
        while self.is_op("|") || inline && found.is_empty() {
            self.eat("|");
            found.push(self.applied()?);
        }
        Ok(found)
    }
}

/// The height of the tallest expression in `kind`.
fn height(kind: &Kind) -> u32 {
    let of = |expr: &Expr| expr.height;
    let args = |args: &Args| {
        let named = args.named.iter().map(|(_, value)| value);
        let more = args.more.iter().chain(&args.more_named).map(|value| &**value);
        args.positional
            .iter()
            .chain(named)
            .chain(more)
            .map(of)
            .max()
            .unwrap_or(0)
    };
    match kind {
        Kind::None | Kind::Bool(_) | Kind::Int(_) | Kind::Float(_) | Kind::Str(_) | Kind::Name(_) => 0,
        Kind::Tuple(items) | Kind::List(items) | Kind::Concat(items) => items.iter().map(of).max().unwrap_or(0),
        Kind::Dict(items) => items
            .iter()
            .map(|(key, value)| of(key).max(of(value)))
            .max()
            .unwrap_or(0),
        Kind::Not(a) | Kind::Sign(_, a) | Kind::Attribute(a, _) => a.height,
        Kind::And(a, b) | Kind::Or(a, b) | Kind::Binary(_, a, b) | Kind::Item(a, b) => a.height.max(b.height),
        Kind::Compare(a, rest) => rest.iter().map(|(_, b)| b.height).fold(a.height, u32::max),
        Kind::Choice(a, b, c) => c.iter().map(|c| c.height).fold(a.height.max(b.height), u32::max),
        Kind::Slice(a, bounds) => bounds.iter().flatten().map(|b| b.height).fold(a.height, u32::max),
        Kind::Call(a, given) => a.height.max(args(given)),
        Kind::Filter(a, applied) | Kind::Test(a, applied) => a.height.max(args(&applied.args)),
    }
}
