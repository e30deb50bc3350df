//! The few of the kernel's types that the programs read (by CO-RE relocations), as BTF of its own.
//!
//! libbpf looks for each of them among all that it is given, for each object anew; and the kernel has some 150,000.

use std::collections::HashMap;

use super::btf::{Btf, Type, kind};
use super::btf_writer::Writer;

/// Where the programs declare the kernel's types that they read.
const DECLARATIONS: &str = include_str!("../bpf/kernel.h");

/// What stands between a type's name and what tells several of that name apart.
const FLAVOR: &str = "___";

/// The names of the structs in `DECLARATIONS`.
fn declared() -> impl Iterator<Item = &'static str> {
    DECLARATIONS.lines().filter_map(|line| line.strip_prefix("struct ")?.strip_suffix(" {"))
}

/// BTF of those types that the kernel has, and of all that they are made of; where they point to isn't.
///
/// `None`: the kernel's own isn't as it should be.
pub(super) fn reduced(kernel: &Btf) -> Option<Vec<u8>> {
    let roots: Vec<_> = declared().map(essential).collect();
    let is_wanted = |ty: &Type<'_>| {
        ty.kind() == kind::STRUCT && ty.name().is_some_and(|name| !name.is_empty() && roots.contains(&essential(name)))
    };
    let mut copy = Copy { kernel, ids: HashMap::new(), queue: Vec::new() };
    for (id, _) in kernel.own_types().filter(|(_, ty)| is_wanted(ty)) {
        copy.id_of(id)?;
    }
    copy.write()
}

/// A type's name without its flavor.
fn essential(name: &str) -> &str {
    name.split_once(FLAVOR).map_or(name, |(name, _)| name)
}

/// Types that are copied, in the order of their new ids.
struct Copy<'a> {
    kernel: &'a Btf,
    ids: HashMap<u32, u32>,
    queue: Vec<u32>,
}

impl Copy<'_> {
    /// The new id of a type, which is to be copied if it wasn't. Typedefs and qualifiers don't matter to relocations.
    fn id_of(&mut self, id: u32) -> Option<u32> {
        let id = self.kernel.underlying(id)?;
        if id == 0 {
            return Some(0);
        }
        let Self { ids, queue, .. } = self;
        Some(*ids.entry(id).or_insert_with(|| {
            queue.push(id);
            queue.len() as u32
        }))
    }

    fn write(mut self) -> Option<Vec<u8>> {
        let mut writer = Writer::new();
        let mut next = 0;
        // It grows meanwhile.
        while let Some(&id) = self.queue.get(next) {
            self.write_type(&mut writer, id)?;
            next += 1;
        }
        Some(writer.finish())
    }

    fn write_type(&mut self, writer: &mut Writer, id: u32) -> Option<()> {
        let ty = self.kernel.type_at(id)?;
        let (kind, third) = (ty.kind(), ty.size()?);
        let (vlen, third, tail) = match kind {
            kind::INT => (0, third, vec![ty.tail(0)?]),
            // Of enums the size is all that matters.
            kind::FLOAT | kind::ENUM | kind::ENUM64 => (0, third, vec![]),
            kind::PTR => (0, 0, vec![]),
            kind::ARRAY => (0, 0, vec![self.id_of(ty.tail(0)?)?, self.id_of(ty.tail(1)?)?, ty.tail(2)?]),
            kind::STRUCT | kind::UNION => (ty.vlen() as u32, third, self.members(writer, &ty)?),
            // Nothing else has a size, so that it could be a member.
            _ => return None,
        };
        writer.add(ty.name()?, kind, vlen, ty.kind_flag().into(), third, &tail);
        Some(())
    }

    fn members(&mut self, writer: &mut Writer, ty: &Type<'_>) -> Option<Vec<u32>> {
        let mut tail = Vec::with_capacity(3 * ty.vlen());
        for member in 0..ty.vlen() {
            let [name, of, offset] = [0, 1, 2].map(|word| ty.tail(3 * member + word));
            tail.extend([writer.string(ty.text(name?)?), self.id_of(of?)?, offset?]);
        }
        Some(tail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header is read as it is meant.
    #[test]
    fn finds_declarations() {
        let names: Vec<_> = declared().collect();
        for name in ["sk_buff", "sock", "task_struct", "in6_addr"] {
            assert!(names.contains(&name), "{names:?}");
        }
        // None is written otherwise, which would be missed.
        let declarations = DECLARATIONS.lines().filter(|line| line.starts_with("struct ") && line.contains('{'));
        assert_eq!(names.len(), declarations.count());
        assert_eq!(essential("sk_buff___old"), "sk_buff");
    }

    /// What is copied is what the programs ask for, member by member, and refers to nothing that is missing.
    #[test]
    fn copies_members() {
        let mut w = Writer::new();
        let int = w.add("int", kind::INT, 0, 0, 4, &[1 << 24 | 32]);
        w.add("unasked", kind::STRUCT, 0, 0, 8, &[]);
        let alias = w.add("number", kind::TYPEDEF, 0, 0, int, &[]);
        let array = w.add("", kind::ARRAY, 0, 0, 0, &[alias, int, 3]);
        let next = w.string("next");
        // Points to what comes after it, which points back.
        let list = w.add("", kind::UNION, 1, 0, 16, &[next, 7, 0]);
        let [len, list_name, bits] = ["len", "list", "bits"].map(|name| w.string(name));
        let skb =
            w.add("sk_buff", kind::STRUCT, 3, 1, 40, &[len, array, 0, list_name, list, 96, bits, int, 3 << 24 | 224]);
        assert_eq!(w.pointer(skb), 7);
        let kernel = Btf::parse(w.finish(), None).unwrap();
        let small = Btf::parse(reduced(&kernel).unwrap(), None).unwrap();
        assert_eq!(small.own_types().count(), 5, "{small:?}");
        let (_, ty) = small.own_types().find(|(_, ty)| ty.name() == Some("sk_buff")).unwrap();
        assert_eq!((ty.kind(), ty.vlen(), ty.kind_flag(), ty.size()), (kind::STRUCT, 3, true, Some(40)));
        let member = |n: usize| (ty.text(ty.tail(3 * n).unwrap()).unwrap(), ty.tail(3 * n + 2).unwrap());
        assert_eq!([0, 1, 2].map(member), [("len", 0), ("list", 96), ("bits", 3 << 24 | 224)]);
        let array = small.type_at(ty.tail(1).unwrap()).unwrap();
        assert_eq!((array.kind(), array.tail(2)), (kind::ARRAY, Some(3)));
        assert_eq!(small.type_at(array.tail(0).unwrap()).unwrap().name(), Some("int"));
        let list = small.type_at(ty.tail(4).unwrap()).unwrap();
        let pointer = small.type_at(list.tail(1).unwrap()).unwrap();
        assert_eq!((pointer.kind(), pointer.reference()), (kind::PTR, Some(0)));
    }

    /// This machine's own kernel's, if it shows it: all that is there is found again.
    #[test]
    fn copies_this_kernels() {
        let Ok(data) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            println!("copies_this_kernels: needs a kernel with BTF, which this isn't");
            return;
        };
        let kernel = Btf::parse(data, None).unwrap();
        let small = Btf::parse(reduced(&kernel).unwrap(), None).unwrap();
        let structs = |btf: &Btf| -> Vec<(String, usize, Option<u32>)> {
            let all = btf.own_types().filter(|(_, ty)| ty.kind() == kind::STRUCT);
            let wanted = all.filter(|(_, ty)| declared().any(|name| ty.name() == Some(name)));
            let mut found: Vec<_> = wanted.map(|(_, ty)| (ty.name().unwrap().into(), ty.vlen(), ty.size())).collect();
            found.sort();
            found
        };
        assert_eq!(structs(&kernel), structs(&small));
        assert!(structs(&small).iter().any(|(name, ..)| name == "sk_buff"));
    }
}
