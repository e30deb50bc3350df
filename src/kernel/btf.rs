//! A reader for the kernel's type information (BTF), as far as function signatures and enums need it.
//!
//! It is ours because libbpf-rs can't open a module's BTF, which builds on vmlinux's ("split BTF"). It reads
//! bytes and nothing else, and takes any bytes: what isn't well-formed BTF is an error or `None`.
//!
//! Format: <https://docs.kernel.org/bpf/btf.html>.

use std::sync::Arc;

/// The kinds of types that there are.
pub(super) mod kind {
    pub(in crate::kernel) const INT: u32 = 1;
    pub(in crate::kernel) const PTR: u32 = 2;
    pub(in crate::kernel) const ARRAY: u32 = 3;
    pub(in crate::kernel) const STRUCT: u32 = 4;
    pub(in crate::kernel) const UNION: u32 = 5;
    pub(in crate::kernel) const ENUM: u32 = 6;
    pub(in crate::kernel) const FWD: u32 = 7;
    pub(in crate::kernel) const TYPEDEF: u32 = 8;
    pub(in crate::kernel) const VOLATILE: u32 = 9;
    pub(in crate::kernel) const CONST: u32 = 10;
    pub(in crate::kernel) const RESTRICT: u32 = 11;
    pub(in crate::kernel) const FUNC: u32 = 12;
    pub(in crate::kernel) const FUNC_PROTO: u32 = 13;
    pub(in crate::kernel) const VAR: u32 = 14;
    pub(in crate::kernel) const DATASEC: u32 = 15;
    pub(in crate::kernel) const FLOAT: u32 = 16;
    pub(in crate::kernel) const DECL_TAG: u32 = 17;
    pub(in crate::kernel) const TYPE_TAG: u32 = 18;
    pub(in crate::kernel) const ENUM64: u32 = 19;
}

const MAGIC: u16 = 0xEB9F;
/// Bytes of `struct btf_type`, which every type begins with.
const TYPE_HEADER: usize = 12;
/// A chain of typedefs and qualifiers longer than this is a cycle.
const LONGEST_CHAIN: usize = 64;

/// What has no name isn't nested deeper in the kernel.
const DEEPEST: u32 = 8;
/// The most members that are looked at, within each other, for one of a name. The kernel's largest structs have hundreds.
const MOST_MEMBERS: u32 = 1 << 12;

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

/// One BTF: vmlinux's, or a module's on top of it.
#[derive(Debug)]
pub(crate) struct Btf {
    base: Option<Arc<Btf>>,
    data: Vec<u8>,
    /// Where each type begins in `data`; ids count from `first_id`.
    types: Vec<u32>,
    first_id: u32,
    strings: std::ops::Range<usize>,
    /// String offsets below this are the base's.
    first_string: u32,
    big_endian: bool,
}

impl Btf {
    /// Reads `data`; `base` is vmlinux's BTF where `data` is a module's.
    pub(crate) fn parse(data: Vec<u8>, base: Option<Arc<Btf>>) -> Result<Self, BtfError> {
        let header = Header::parse(&data)?;
        let mut btf = Self {
            types: Vec::new(),
            first_id: base.as_ref().map_or(1, |base| base.end_id()),
            strings: header.strings.clone(),
            first_string: base.as_ref().map_or(0, |base| base.first_string + base.strings.len() as u32),
            big_endian: header.big_endian,
            base,
            data,
        };
        btf.index(header.types)?;
        Ok(btf)
    }

    pub(super) fn end_id(&self) -> u32 {
        self.first_id + self.types.len() as u32
    }

    #[cfg(test)]
    pub(super) fn end_string(&self) -> u32 {
        self.first_string + self.strings.len() as u32
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
    pub(super) fn type_at(&self, id: u32) -> Option<Type<'_>> {
        match &self.base {
            Some(base) if id < self.first_id => base.type_at(id),
            _ => {
                let at = *self.types.get(id.checked_sub(self.first_id)? as usize)? as usize;
                Some(Type { btf: self, at, info: self.u32(at + 4)? })
            }
        }
    }

    fn string(&self, offset: u32) -> Option<&[u8]> {
        match &self.base {
            Some(base) if offset < self.first_string => base.string(offset),
            _ => {
                let strings = self.data.get(self.strings.clone())?;
                let rest = strings.get((offset - self.first_string) as usize..)?;
                Some(&rest[..rest.iter().position(|&byte| byte == 0)?])
            }
        }
    }

    /// The types that this BTF itself describes (not its base), with their ids.
    pub(super) fn own_types(&self) -> impl Iterator<Item = (u32, Type<'_>)> {
        (self.first_id..self.end_id()).filter_map(|id| Some((id, self.type_at(id)?)))
    }

    /// Where a struct or a union has a member that isn't a bit field, also within members without a name; in bits.
    pub(super) fn member_offset(&self, ty: &Type<'_>, wanted: &str) -> Option<u32> {
        let mut left = MOST_MEMBERS;
        self.member_within(ty, wanted, DEEPEST, &mut left)
    }

    /// `left` is how many members may still be looked at: what contains itself several times has no end that is near.
    fn member_within(&self, ty: &Type<'_>, wanted: &str, depth: u32, left: &mut u32) -> Option<u32> {
        if depth == 0 || !matches!(ty.kind(), kind::STRUCT | kind::UNION) {
            return None;
        }
        (0..ty.vlen()).find_map(|member| {
            *left = left.checked_sub(1)?;
            let [name, of, at] = [0, 1, 2].map(|word| ty.tail(3 * member + word));
            // Where there are bit fields, the upper bits are the width.
            let at = if ty.kind_flag() { at? & 0xff_ffff } else { at? };
            match ty.text(name?)? {
                "" => at.checked_add(self.member_within(&self.skip_modifiers(of?)?, wanted, depth - 1, left)?),
                name => (name == wanted).then_some(at),
            }
        })
    }

    /// Follows typedefs and qualifiers; `None` for `void`.
    pub(super) fn skip_modifiers(&self, id: u32) -> Option<Type<'_>> {
        self.type_at(self.underlying(id)?)
    }

    /// The id of what is behind typedefs and qualifiers; 0 is `void`. `None`: they never end, or there is no such type.
    pub(super) fn underlying(&self, mut id: u32) -> Option<u32> {
        for _ in 0..LONGEST_CHAIN {
            if id == 0 {
                return Some(0);
            }
            let ty = self.type_at(id)?;
            match ty.kind() {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = ty.reference()?
                }
                _ => return Some(id),
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
pub(super) struct Type<'a> {
    pub(super) btf: &'a Btf,
    at: usize,
    info: u32,
}

impl<'a> Type<'a> {
    pub(super) fn kind(&self) -> u32 {
        self.info >> 24 & 0x1f
    }

    /// How many members, parameters or values it has.
    pub(super) fn vlen(&self) -> usize {
        (self.info & 0xffff) as usize
    }

    pub(super) fn kind_flag(&self) -> bool {
        self.info >> 31 == 1
    }

    /// Empty where it has none.
    pub(super) fn name(&self) -> Option<&'a str> {
        self.text(self.btf.u32(self.at)?)
    }

    /// The third word where it is a size.
    pub(super) fn size(&self) -> Option<u32> {
        self.btf.u32(self.at + 8)
    }

    /// The third word where it is a type's id.
    pub(super) fn reference(&self) -> Option<u32> {
        self.btf.u32(self.at + 8)
    }

    /// A word of what follows the type's first three.
    pub(super) fn tail(&self, word: usize) -> Option<u32> {
        self.btf.u32(self.at + TYPE_HEADER + 4 * word)
    }

    /// The string at an offset that this type refers to.
    pub(super) fn text(&self, offset: u32) -> Option<&'a str> {
        std::str::from_utf8(self.btf.string(offset)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::btf_writer::Writer;
    use crate::kernel::canned::vmlinux;

    fn functions(btf: &Btf) -> Vec<&str> {
        let functions = btf.own_types().filter(|(_, ty)| ty.kind() == kind::FUNC);
        functions.filter_map(|(_, ty)| ty.name()).collect()
    }

    /// A module's BTF takes types and strings from vmlinux's, and lists only its own.
    #[test]
    fn reads_split_btf() {
        let base = Arc::new(Btf::parse(vmlinux().finish(), None).unwrap());
        let mut w = Writer::on_top_of(&base);
        w.func("nf_conntrack_in", 1, &[("skb", 4)]);
        let module = Btf::parse(w.finish(), Some(Arc::clone(&base))).unwrap();
        assert_eq!(functions(&module), ["nf_conntrack_in"]);
        assert_eq!(module.type_at(1).unwrap().name(), Some("int"));
        assert_eq!(module.end_id(), base.end_id() + 2);
    }

    /// Every truncation and every changed byte gives an error or an answer, never a panic or an endless loop.
    #[test]
    fn takes_any_bytes() {
        let data = vmlinux().finish();
        for len in 0..data.len() {
            assert!(Btf::parse(data[..len].to_vec(), None).is_err(), "{len} bytes were accepted");
        }
        for at in 0..data.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bent = data.clone();
                bent[at] = value;
                if let Ok(btf) = Btf::parse(bent, None) {
                    for (id, _) in btf.own_types() {
                        let _ = (btf.signature(id), btf.tracepoint(id), btf.enumerators(id));
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
        let b = w.add("", kind::CONST, 0, 0, 3, &[]);
        w.add("", kind::CONST, 0, 0, b, &[]);
        let f = w.func("f", a, &[("a", a), ("b", b)]);
        let btf = Btf::parse(w.finish(), None).unwrap();
        assert_eq!(btf.signature(f).unwrap().params.len(), 2);
    }
}
