//! A reader for the kernel's type information (BTF), as far as function signatures need it.
//!
//! It is ours because libbpf-rs can't open a module's BTF, which builds on vmlinux's ("split BTF"). It reads
//! bytes and nothing else, and takes any bytes: what isn't well-formed BTF is an error or `None`.
//!
//! Format: <https://docs.kernel.org/bpf/btf.html>.

/// The kinds of types that function signatures are made of.
mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const PTR: u32 = 2;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const FWD: u32 = 7;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const RESTRICT: u32 = 11;
    pub(super) const FUNC: u32 = 12;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const FLOAT: u32 = 16;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const TYPE_TAG: u32 = 18;
    pub(super) const ENUM64: u32 = 19;
}

const MAGIC: u16 = 0xEB9F;
/// Bytes of `struct btf_type`, which every type begins with.
const TYPE_HEADER: usize = 12;
/// A chain of typedefs and qualifiers longer than this is a cycle.
const LONGEST_CHAIN: usize = 64;

/// Why some bytes are no BTF.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum BtfError {
    #[error("it ends within {0}")]
    Truncated(&'static str),
    #[error("its magic number is {0:#06x}, not 0xeb9f")]
    Magic(u16),
    #[error("type {id} is of unknown kind {kind}")]
    UnknownKind { id: u32, kind: u32 },
}

/// What a function takes and returns, in the terms of an fentry/fexit context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) params: Vec<Param>,
    pub(crate) ret: Return,
    pub(crate) variadic: bool,
}

/// One parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Param {
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

/// One BTF: vmlinux's, or a module's on top of it.
#[derive(Debug)]
pub(crate) struct Btf<'base> {
    base: Option<&'base Btf<'base>>,
    data: Vec<u8>,
    /// Where each type begins in `data`; ids count from `first_id`.
    types: Vec<u32>,
    first_id: u32,
    strings: std::ops::Range<usize>,
    /// String offsets below this are the base's.
    first_string: u32,
    big_endian: bool,
}

impl<'base> Btf<'base> {
    /// Reads `data`; `base` is vmlinux's BTF where `data` is a module's.
    pub(crate) fn parse(data: Vec<u8>, base: Option<&'base Btf<'base>>) -> Result<Self, BtfError> {
        let header = Header::parse(&data)?;
        let mut btf = Self {
            base,
            types: Vec::new(),
            first_id: base.map_or(1, Btf::end_id),
            strings: header.strings.clone(),
            first_string: base.map_or(0, |base| base.first_string + base.strings.len() as u32),
            big_endian: header.big_endian,
            data,
        };
        btf.index(header.types)?;
        Ok(btf)
    }

    fn end_id(&self) -> u32 {
        self.first_id + self.types.len() as u32
    }

    /// Finds where each type begins.
    fn index(&mut self, types: std::ops::Range<usize>) -> Result<(), BtfError> {
        let mut at = types.start;
        while at < types.end {
            let id = self.end_id();
            let info = self.u32(at + 4).ok_or(BtfError::Truncated("its types"))?;
            let (kind, vlen) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
            let tail = match kind {
                kind::INT | kind::VAR | kind::DECL_TAG => 4,
                kind::ARRAY => 12,
                kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * vlen,
                kind::ENUM | kind::FUNC_PROTO => 8 * vlen,
                kind::PTR | kind::FWD | kind::TYPEDEF | kind::VOLATILE | kind::CONST => 0,
                kind::RESTRICT | kind::FUNC | kind::FLOAT | kind::TYPE_TAG => 0,
                _ => return Err(BtfError::UnknownKind { id, kind }),
            };
            let next = at + TYPE_HEADER + tail;
            if next > types.end {
                return Err(BtfError::Truncated("its types"));
            }
            self.types.push(at as u32);
            at = next;
        }
        Ok(())
    }

    fn u32(&self, at: usize) -> Option<u32> {
        let bytes = self.data.get(at..at.checked_add(4)?)?.try_into().ok()?;
        Some(if self.big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
    }

    /// The type `id`, wherever it is; 0 is `void` and has none.
    fn type_at(&self, id: u32) -> Option<Type<'_>> {
        match self.base {
            Some(base) if id < self.first_id => base.type_at(id),
            _ => {
                let at = *self.types.get(id.checked_sub(self.first_id)? as usize)? as usize;
                Some(Type { btf: self, at, info: self.u32(at + 4)? })
            }
        }
    }

    fn string(&self, offset: u32) -> Option<&[u8]> {
        match self.base {
            Some(base) if offset < self.first_string => base.string(offset),
            _ => {
                let strings = self.data.get(self.strings.clone())?;
                let rest = strings.get((offset - self.first_string) as usize..)?;
                Some(&rest[..rest.iter().position(|&byte| byte == 0)?])
            }
        }
    }

    /// The ids and names of the functions that this BTF itself describes (not its base).
    pub(crate) fn functions(&self) -> impl Iterator<Item = (u32, &str)> {
        (self.first_id..self.end_id()).filter_map(|id| {
            let function = self.type_at(id).filter(|ty| ty.kind() == kind::FUNC)?;
            Some((id, function.name()?))
        })
    }

    /// The signature of the function with this id.
    pub(crate) fn signature(&self, id: u32) -> Option<Signature> {
        let function = self.type_at(id).filter(|ty| ty.kind() == kind::FUNC)?;
        let proto = self.type_at(function.reference()?).filter(|ty| ty.kind() == kind::FUNC_PROTO)?;
        let mut params = Vec::new();
        let mut variadic = false;
        for n in 0..proto.vlen() {
            let param = proto.at + TYPE_HEADER + 8 * n;
            match proto.btf.u32(param + 4)? {
                // An ellipsis is written as a last parameter of type void.
                0 => variadic = true,
                ty => params.push(self.param(ty)),
            }
        }
        Some(Signature { params, ret: self.return_of(proto.reference()?), variadic })
    }

    fn param(&self, id: u32) -> Param {
        let ty = self.skip_modifiers(id);
        let points_to = ty.as_ref().filter(|ty| ty.kind() == kind::PTR).and_then(|pointer| {
            let target = self.skip_modifiers(pointer.reference()?)?;
            let named = matches!(target.kind(), kind::STRUCT | kind::FWD);
            named.then(|| target.name().map(str::to_owned))?
        });
        let bytes = match &ty {
            Some(ty) if ty.kind() != kind::PTR => ty.size_or_type().unwrap_or(8),
            _ => 8,
        };
        Param { words: bytes.div_ceil(8), points_to }
    }

    fn return_of(&self, id: u32) -> Return {
        if id == 0 {
            return Return::Void;
        }
        let Some(ty) = self.skip_modifiers(id) else { return Return::Void };
        let bytes = ty.size_or_type().unwrap_or(0);
        match ty.kind() {
            kind::PTR => Return::Number { bytes: 8, signed: false },
            kind::INT if bytes <= 8 => Return::Number { bytes, signed: ty.int_is_signed() },
            kind::ENUM | kind::ENUM64 => Return::Number { bytes, signed: ty.kind_flag() },
            _ => Return::Other,
        }
    }

    /// Follows typedefs and qualifiers; `None` for `void`.
    fn skip_modifiers(&self, id: u32) -> Option<Type<'_>> {
        let mut ty = self.type_at(id)?;
        for _ in 0..LONGEST_CHAIN {
            match ty.kind() {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    ty = self.type_at(ty.reference()?)?;
                }
                _ => return Some(ty),
            }
        }
        None
    }
}

struct Header {
    big_endian: bool,
    types: std::ops::Range<usize>,
    strings: std::ops::Range<usize>,
}

impl Header {
    fn parse(data: &[u8]) -> Result<Self, BtfError> {
        const HEADER: BtfError = BtfError::Truncated("its header");
        let magic = data.get(..2).and_then(|bytes| bytes.try_into().ok()).ok_or(HEADER)?;
        let big_endian = match u16::from_le_bytes(magic) {
            MAGIC => false,
            other if other.swap_bytes() == MAGIC => true,
            other => return Err(BtfError::Magic(other)),
        };
        let word = |at: usize| -> Result<usize, BtfError> {
            let bytes = data.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).ok_or(HEADER)?;
            Ok(if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) } as usize)
        };
        let start = word(4)?;
        let section = |offset: usize, len: usize, what| {
            let from = start.checked_add(offset).ok_or(BtfError::Truncated(what))?;
            let to = from.checked_add(len).filter(|&to| to <= data.len()).ok_or(BtfError::Truncated(what))?;
            Ok(from..to)
        };
        Ok(Self {
            big_endian,
            types: section(word(8)?, word(12)?, "its types")?,
            strings: section(word(16)?, word(20)?, "its strings")?,
        })
    }
}

/// One type, within the BTF that holds it.
struct Type<'a> {
    btf: &'a Btf<'a>,
    at: usize,
    info: u32,
}

impl<'a> Type<'a> {
    fn kind(&self) -> u32 {
        self.info >> 24 & 0x1f
    }

    fn vlen(&self) -> usize {
        (self.info & 0xffff) as usize
    }

    fn kind_flag(&self) -> bool {
        self.info >> 31 == 1
    }

    fn name(&self) -> Option<&'a str> {
        std::str::from_utf8(self.btf.string(self.btf.u32(self.at)?)?).ok()
    }

    /// The third word: a size or a type's id, depending on the kind.
    fn size_or_type(&self) -> Option<u32> {
        self.btf.u32(self.at + 8)
    }

    fn reference(&self) -> Option<u32> {
        self.size_or_type()
    }

    fn int_is_signed(&self) -> bool {
        const SIGNED: u32 = 1 << 24;
        self.btf.u32(self.at + TYPE_HEADER).is_some_and(|encoding| encoding & SIGNED != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes BTF as the kernel would.
    struct Writer {
        types: Vec<u8>,
        strings: Vec<u8>,
        first_string: u32,
        next_id: u32,
    }

    impl Writer {
        fn new() -> Self {
            Self { types: Vec::new(), strings: vec![0], first_string: 0, next_id: 1 }
        }

        fn on_top_of(base: &Btf<'_>) -> Self {
            let first_string = base.strings.len() as u32;
            Self { types: Vec::new(), strings: Vec::new(), first_string, next_id: base.end_id() }
        }

        fn string(&mut self, text: &str) -> u32 {
            let at = self.first_string + self.strings.len() as u32;
            self.strings.extend(text.bytes());
            self.strings.push(0);
            at
        }

        fn add(&mut self, name: &str, kind: u32, vlen: u32, flag: u32, third: u32, tail: &[u32]) -> u32 {
            let name = if name.is_empty() { 0 } else { self.string(name) };
            for word in [name, flag << 31 | kind << 24 | vlen, third].iter().chain(tail) {
                self.types.extend(word.to_le_bytes());
            }
            self.next_id += 1;
            self.next_id - 1
        }

        fn func(&mut self, name: &str, ret: u32, params: &[u32]) -> u32 {
            let tail: Vec<u32> = params.iter().flat_map(|&ty| [0, ty]).collect();
            let proto = self.add("", kind::FUNC_PROTO, params.len() as u32, 0, ret, &tail);
            self.add(name, kind::FUNC, 0, 0, proto, &[])
        }

        fn finish(&self) -> Vec<u8> {
            let mut data = Vec::new();
            data.extend(MAGIC.to_le_bytes());
            data.extend([1, 0]);
            for word in [24, 0, self.types.len() as u32, self.types.len() as u32, self.strings.len() as u32] {
                data.extend(word.to_le_bytes());
            }
            data.extend(&self.types);
            data.extend(&self.strings);
            data
        }
    }

    const SIGNED_INT: u32 = 1 << 24 | 32;

    fn vmlinux() -> (Vec<u8>, u32) {
        let mut w = Writer::new();
        let int = w.add("int", kind::INT, 0, 0, 4, &[SIGNED_INT]);
        let skb = w.add("sk_buff", kind::STRUCT, 0, 0, 232, &[]);
        let constant = w.add("", kind::CONST, 0, 0, skb, &[]);
        let skb_ptr = w.add("", kind::PTR, 0, 0, constant, &[]);
        let alias = w.add("skb_t", kind::TYPEDEF, 0, 0, skb_ptr, &[]);
        let pair = w.add("pair", kind::STRUCT, 0, 0, 16, &[]);
        let state = w.add("state", kind::ENUM, 0, 0, 4, &[]);
        w.func("ip_rcv", int, &[alias, int]);
        w.func("by_value", 0, &[pair, int]);
        w.func("printf_like", state, &[skb_ptr, 0]);
        w.func("odd", pair, &[]);
        (w.finish(), skb_ptr)
    }

    fn signature(btf: &Btf<'_>, name: &str) -> Signature {
        let (id, _) = btf.functions().find(|(_, n)| *n == name).expect("the function is there");
        btf.signature(id).expect("it has a signature")
    }

    /// Names, parameters behind typedefs and qualifiers, and the kinds of return values are read.
    #[test]
    fn reads_signatures() {
        let (data, _) = vmlinux();
        let btf = Btf::parse(data, None).unwrap();
        let names: Vec<_> = btf.functions().map(|(_, name)| name).collect();
        assert_eq!(names, ["ip_rcv", "by_value", "printf_like", "odd"]);

        let ip_rcv = signature(&btf, "ip_rcv");
        assert_eq!(ip_rcv.ret, Return::Number { bytes: 4, signed: true });
        assert_eq!(ip_rcv.params[0], Param { words: 1, points_to: Some("sk_buff".into()) });
        assert_eq!(ip_rcv.params[1], Param { words: 1, points_to: None });
        assert!(!ip_rcv.variadic);

        let by_value = signature(&btf, "by_value");
        assert_eq!(by_value.ret, Return::Void);
        assert_eq!(by_value.params.iter().map(|param| param.words).collect::<Vec<_>>(), [2, 1]);

        let variadic = signature(&btf, "printf_like");
        assert!(variadic.variadic);
        assert_eq!(variadic.params.len(), 1);
        assert_eq!(variadic.ret, Return::Number { bytes: 4, signed: false });

        assert_eq!(signature(&btf, "odd").ret, Return::Other);
    }

    /// A module's BTF takes types and strings from vmlinux's, and lists only its own functions.
    #[test]
    fn reads_split_btf() {
        let (data, skb_ptr) = vmlinux();
        let base = Btf::parse(data, None).unwrap();
        let mut w = Writer::on_top_of(&base);
        w.func("nf_conntrack_in", 1, &[skb_ptr]);
        let module = Btf::parse(w.finish(), Some(&base)).unwrap();
        let names: Vec<_> = module.functions().map(|(_, name)| name).collect();
        assert_eq!(names, ["nf_conntrack_in"]);
        assert_eq!(signature(&module, "nf_conntrack_in").params[0].points_to.as_deref(), Some("sk_buff"));
    }

    /// Every truncation and every changed byte gives an error or an answer, never a panic or an endless loop.
    #[test]
    fn takes_any_bytes() {
        let (data, _) = vmlinux();
        for len in 0..data.len() {
            assert!(Btf::parse(data[..len].to_vec(), None).is_err(), "{len} bytes were accepted");
        }
        for at in 0..data.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bent = data.clone();
                bent[at] = value;
                if let Ok(btf) = Btf::parse(bent, None) {
                    for (id, _) in btf.functions() {
                        let _ = btf.signature(id);
                    }
                }
            }
        }
    }

    /// A cycle of typedefs ends.
    #[test]
    fn survives_cycles() {
        let mut w = Writer::new();
        let a = w.add("a", kind::TYPEDEF, 0, 0, 2, &[]);
        w.add("b", kind::TYPEDEF, 0, 0, a, &[]);
        w.func("f", a, &[a]);
        let btf = Btf::parse(w.finish(), None).unwrap();
        assert_eq!(signature(&btf, "f").params.len(), 1);
    }

    /// The running kernel's own BTF is understood, where it has one.
    #[test]
    fn reads_this_kernel() {
        let Ok(data) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            eprintln!("this kernel has no BTF: nothing to read");
            return;
        };
        let btf = Btf::parse(data, None).unwrap();
        let ip_rcv = signature(&btf, "ip_rcv");
        assert_eq!(ip_rcv.params.len(), 4);
        assert_eq!(ip_rcv.params[0].points_to.as_deref(), Some("sk_buff"));
        assert_eq!(ip_rcv.ret, Return::Number { bytes: 4, signed: true });
    }
}
