//! What functions and tracepoints take and return, from BTF.

use std::fmt;

use super::btf::{Btf, Type, kind};

/// A type's text goes through no more pointers and qualifiers than this: C's own types have a few, a cycle has no end.
const DEEPEST_TEXT: usize = 16;

/// What a function takes and returns, in the terms of an fentry/fexit context; or what a tracepoint hands over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) params: Vec<Param>,
    pub(crate) ret: Return,
    /// The name of the struct that the value returned points to, if it is a pointer to one.
    pub(crate) ret_points_to: Option<String>,
    pub(crate) variadic: bool,
}

/// One parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Param {
    /// Empty where BTF doesn't tell.
    pub(crate) name: String,
    /// As C has it, for people: `const struct sk_buff *`.
    pub(crate) ty: String,
    /// 64-bit words of the context that it takes: 1, or 2 for a struct or integer of more than 8 bytes.
    pub(crate) words: u32,
    /// The name of the struct that it points to, if it is a pointer to one.
    pub(crate) points_to: Option<String>,
}

/// What a function returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Return {
    Void,
    /// An integer, boolean, enum or pointer of this many bytes.
    Number {
        bytes: u32,
        signed: bool,
    },
    /// Something that fits no register: a struct or union by value, a float.
    Other,
}

impl Signature {
    /// 64-bit words of the context that all parameters take.
    pub(crate) fn words(&self) -> u32 {
        self.word_of(self.params.len())
    }

    /// The first 64-bit word of a parameter.
    pub(crate) fn word_of(&self, param: usize) -> u32 {
        self.params.iter().take(param).fold(0, |words, param| words.saturating_add(param.words))
    }

    /// Whether both are the same but for the parameters' names.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let unnamed = |signature: &Self| {
            let mut signature = signature.clone();
            signature.params.iter_mut().for_each(|param| param.name.clear());
            signature
        };
        unnamed(self) == unnamed(other)
    }

    /// Of a function's prototype, without its first `skip` parameters.
    fn of(proto: &Type<'_>, skip: usize) -> Option<Self> {
        if proto.kind() != kind::FUNC_PROTO {
            return None;
        }
        let mut params = Vec::new();
        let mut variadic = false;
        for n in skip..proto.vlen() {
            match proto.tail(2 * n + 1)? {
                // An ellipsis is written as a last parameter of type void.
                0 => variadic = true,
                id => params.push(Param::of(proto.btf, proto.text(proto.tail(2 * n)?).unwrap_or_default(), id)),
            }
        }
        let ret = proto.reference()?;
        Some(Self { params, ret: Return::of(proto.btf, ret), ret_points_to: points_to(proto.btf, ret), variadic })
    }
}

impl Param {
    fn of(btf: &Btf, name: &str, id: u32) -> Self {
        let bytes = match btf.skip_modifiers(id) {
            Some(ty) if ty.kind() != kind::PTR => ty.size().unwrap_or(8),
            _ => 8,
        };
        Self { name: name.to_owned(), ty: text(btf, id), words: bytes.div_ceil(8), points_to: points_to(btf, id) }
    }
}

/// As C declares it: `struct sk_buff *skb`.
impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, ty, .. } = self;
        if let Some((before, after)) = ty.split_once("(*") {
            return write!(f, "{before}(*{name}{after}");
        }
        let space = if name.is_empty() || ty.ends_with('*') { "" } else { " " };
        write!(f, "{ty}{space}{name}")
    }
}

impl Return {
    fn of(btf: &Btf, id: u32) -> Self {
        let Some(ty) = btf.skip_modifiers(id) else { return Self::Void };
        let bytes = ty.size().unwrap_or(0);
        match ty.kind() {
            kind::PTR => Self::Number { bytes: 8, signed: false },
            kind::INT if bytes <= 8 => Self::Number { bytes, signed: is_signed(&ty) },
            kind::ENUM | kind::ENUM64 => Self::Number { bytes, signed: ty.kind_flag() },
            _ => Self::Other,
        }
    }
}

fn is_signed(int: &Type<'_>) -> bool {
    const SIGNED: u32 = 1 << 24;
    int.tail(0).is_some_and(|encoding| encoding & SIGNED != 0)
}

fn points_to(btf: &Btf, id: u32) -> Option<String> {
    let pointer = btf.skip_modifiers(id).filter(|ty| ty.kind() == kind::PTR)?;
    let target = btf.skip_modifiers(pointer.reference()?)?;
    let named = matches!(target.kind(), kind::STRUCT | kind::FWD);
    named.then(|| target.name().map(str::to_owned))?
}

/// The type as C has it. What a pointer to a function takes is left out.
fn text(btf: &Btf, id: u32) -> String {
    text_within(btf, id, DEEPEST_TEXT).unwrap_or_else(|| "?".to_owned())
}

fn text_within(btf: &Btf, id: u32, depth: usize) -> Option<String> {
    if id == 0 {
        return Some("void".to_owned());
    }
    let depth = depth.checked_sub(1)?;
    let ty = btf.type_at(id)?;
    let inner = |id| text_within(btf, id, depth);
    let named = |keyword: &str| match ty.name() {
        None | Some("") => Some(format!("{keyword} {{...}}")),
        Some(name) => Some(format!("{keyword} {name}")),
    };
    let qualified = |qualifier: &str| {
        let inner = inner(ty.reference()?)?;
        Some(if inner.ends_with(['*', ')']) { format!("{inner} {qualifier}") } else { format!("{qualifier} {inner}") })
    };
    match ty.kind() {
        kind::STRUCT => named("struct"),
        kind::UNION => named("union"),
        kind::ENUM | kind::ENUM64 => named("enum"),
        kind::FWD => named(if ty.kind_flag() { "union" } else { "struct" }),
        kind::CONST => qualified("const"),
        kind::VOLATILE => qualified("volatile"),
        kind::RESTRICT | kind::TYPE_TAG => inner(ty.reference()?),
        kind::PTR => {
            let target = btf.type_at(ty.reference()?);
            if let Some(proto) = target.filter(|target| target.kind() == kind::FUNC_PROTO) {
                return Some(format!("{} (*)()", inner(proto.reference()?)?));
            }
            let inner = inner(ty.reference()?)?;
            Some(if inner.ends_with('*') { format!("{inner}*") } else { format!("{inner} *") })
        }
        _ => ty.name().map(str::to_owned),
    }
}

impl Btf {
    /// The signature of the function with this id.
    pub(super) fn signature(&self, id: u32) -> Option<Signature> {
        let function = self.type_at(id).filter(|ty| ty.kind() == kind::FUNC)?;
        Signature::of(&self.type_at(function.reference()?)?, 0)
    }

    /// What the tracepoint hands over whose type this is: a pointer to a function that takes the tracepoint's own data
    /// and then these.
    pub(super) fn tracepoint(&self, id: u32) -> Option<Signature> {
        let pointer = self.skip_modifiers(id).filter(|ty| ty.kind() == kind::PTR)?;
        Signature::of(&self.type_at(pointer.reference()?)?, 1)
    }

    /// The values of an enum, of which those of more than 32 bits lose the upper ones.
    pub(super) fn enumerators(&self, id: u32) -> Vec<(u32, String)> {
        let Some(ty) = self.type_at(id) else { return Vec::new() };
        let words = match ty.kind() {
            kind::ENUM => 2,
            kind::ENUM64 => 3,
            _ => return Vec::new(),
        };
        let value = |n| Some((ty.tail(words * n + 1)?, ty.text(ty.tail(words * n)?)?.to_owned()));
        (0..ty.vlen()).filter_map(value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::canned::vmlinux;

    fn id(btf: &Btf, name: &str) -> u32 {
        btf.own_types().find(|(_, ty)| ty.name() == Some(name)).expect("it is there").0
    }

    fn signature(name: &str) -> Signature {
        let btf = Btf::parse(vmlinux().finish(), None).unwrap();
        btf.signature(id(&btf, name)).expect("it has a signature")
    }

    /// Names, parameters behind typedefs and qualifiers, and the kinds of return values are read.
    #[test]
    fn reads_signatures() {
        let ip_rcv = signature("ip_rcv");
        assert_eq!((ip_rcv.ret, ip_rcv.ret_points_to), (Return::Number { bytes: 4, signed: true }, None));
        let skb = Param { name: "skb".into(), ty: "skb_t".into(), words: 1, points_to: Some("sk_buff".into()) };
        let n = Param { name: "n".into(), ty: "int".into(), words: 1, points_to: None };
        assert_eq!(ip_rcv.params, [skb, n]);
        assert!(!ip_rcv.variadic);

        let variadic = signature("printf_like");
        assert!(variadic.variadic);
        assert_eq!(variadic.params.len(), 1);
        assert_eq!(variadic.ret, Return::Number { bytes: 4, signed: false });

        assert_eq!(signature("odd").ret, Return::Other);
    }

    /// A struct of 16 bytes takes two words, and moves what follows it.
    #[test]
    fn counts_words() {
        let by_value = signature("by_value");
        assert_eq!(by_value.ret, Return::Void);
        assert_eq!((by_value.words(), by_value.word_of(0), by_value.word_of(1)), (3, 0, 2));
        assert_eq!(signature("odd").words(), 0);
    }

    /// Types as C has them; a pointer to a pointer isn't one to a struct.
    #[test]
    fn writes_c() {
        let texts = signature("texts");
        let params: Vec<_> = texts.params.iter().map(Param::to_string).collect();
        assert_eq!(
            params,
            ["struct sk_buff **a", "struct sk_buff * const b", "int (*okfn)()", "union {...}", "int *p"]
        );
        let points_to: Vec<_> = texts.params.iter().map(|param| param.points_to.as_deref()).collect();
        assert_eq!(points_to, [None, Some("sk_buff"), None, None, None]);
        assert_eq!(texts.ret_points_to.as_deref(), Some("sk_buff"));
        assert_eq!(signature("printf_like").params[0].to_string(), "const struct sk_buff *skb");
        assert_eq!(signature("by_value").params[1].to_string(), "int n");
    }

    /// A tracepoint's own data isn't one of its arguments.
    #[test]
    fn reads_tracepoints() {
        let btf = Btf::parse(vmlinux().finish(), None).unwrap();
        let kfree_skb = btf.tracepoint(id(&btf, "btf_trace_kfree_skb")).unwrap();
        let params: Vec<_> = kfree_skb.params.iter().map(Param::to_string).collect();
        assert_eq!(params, ["struct sk_buff *", "enum skb_drop_reason"]);
        assert_eq!(btf.tracepoint(id(&btf, "int")), None);
    }

    /// Enums of 32 and of 64 bits; what is none has no values.
    #[test]
    fn reads_enums() {
        let btf = Btf::parse(vmlinux().finish(), None).unwrap();
        let reasons = btf.enumerators(id(&btf, "skb_drop_reason"));
        assert_eq!(reasons, [(0, "SKB_NOT_DROPPED_YET".to_owned()), (1, "SKB_CONSUMED".to_owned())]);
        assert_eq!(btf.enumerators(id(&btf, "wide")), [(7, "BIG".to_owned())]);
        assert_eq!(btf.enumerators(id(&btf, "int")), []);
    }
}
