//! One BTF and what it has under which name.

use std::hash::{DefaultHasher, Hasher as _};
use std::sync::Arc;

use super::btf::{Btf, BtfError, kind};
use super::signature::Signature;

/// What the kernel puts before the names of its tracepoints' types.
const TRACEPOINT: &str = "btf_trace_";
/// Before the names of the functions that call a tracepoint's programs, and of those that hand it to older ones. The
/// types of tracepoints don't name their arguments, these do; the second stands for a whole class of them.
const NAMESAKES: [&str; 2] = ["__traceiter_", "__bpf_trace_"];

/// A BTF, with the ids of its functions and tracepoints by name.
pub(super) struct Index {
    btf: Arc<Btf>,
    functions: ByHash,
    tracepoints: ByHash,
}

/// Types by the hashes of their names, sorted. A map of the names takes several times as long to make as the types take
/// to read, for the sake of a few look-ups.
struct ByHash(Vec<(u64, u32)>);

impl ByHash {
    fn new<'a>(types: impl Iterator<Item = (u32, &'a str)>) -> Self {
        let mut types: Vec<_> = types.map(|(id, name)| (hash(name), id)).collect();
        types.sort_unstable();
        Self(types)
    }

    /// The types whose names have the same hash, in their order.
    fn like(&self, name: &str) -> impl Iterator<Item = u32> {
        let wanted = hash(name);
        let first = self.0.partition_point(|&(hash, _)| hash < wanted);
        self.0[first..].iter().take_while(move |&&(hash, _)| hash == wanted).map(|&(_, id)| id)
    }
}

/// The ids and names of a BTF's functions.
fn functions(btf: &Btf) -> impl Iterator<Item = (u32, &str)> {
    btf.own_types().filter(|(_, ty)| ty.kind() == kind::FUNC).filter_map(|(id, ty)| Some((id, ty.name()?)))
}

/// The ids of the tracepoints' types, and the tracepoints' names.
fn tracepoints(btf: &Btf) -> impl Iterator<Item = (u32, &str)> {
    let typedefs = btf.own_types().filter(|(_, ty)| ty.kind() == kind::TYPEDEF);
    typedefs.filter_map(|(id, ty)| Some((id, bare(ty.name()?)?)))
}

/// The name of the tracepoint whose type this is.
fn bare(name: &str) -> Option<&str> {
    name.strip_prefix(TRACEPOINT)
}

fn hash(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(name.as_bytes());
    hasher.finish()
}

impl Index {
    /// Reads `data`; `base` is vmlinux's where `data` is a module's.
    pub(super) fn parse(data: Vec<u8>, base: Option<&Self>) -> Result<Self, BtfError> {
        let btf = Arc::new(Btf::parse(data, base.map(|base| Arc::clone(&base.btf)))?);
        let (functions, tracepoints) = (ByHash::new(functions(&btf)), ByHash::new(tracepoints(&btf)));
        Ok(Self { btf, functions, tracepoints })
    }

    /// The signatures of all functions of this name.
    pub(super) fn functions(&self, name: &str) -> Vec<Signature> {
        let named = self.functions.like(name).filter(|&id| self.name(id) == Some(name));
        named.filter_map(|id| self.btf.signature(id)).collect()
    }

    /// What the tracepoint of this name hands over.
    pub(super) fn tracepoint(&self, name: &str) -> Option<Signature> {
        let id = self.tracepoints.like(name).find(|&id| self.name(id).and_then(bare) == Some(name))?;
        let mut signature = self.btf.tracepoint(id)?;
        let namesakes = NAMESAKES.iter().flat_map(|prefix| self.functions(&format!("{prefix}{name}")));
        // As with the types, the first is the tracepoint's own data.
        if let Some(namesake) = namesakes.into_iter().find(|found| found.params.len() == signature.params.len() + 1) {
            for (param, named) in signature.params.iter_mut().zip(namesake.params.into_iter().skip(1)) {
                param.name = named.name;
            }
        }
        Some(signature)
    }

    /// The values of the enum of this name.
    pub(super) fn enumerators(&self, name: &str) -> Vec<(u32, String)> {
        // There is more than one where a part of the kernel only declares it.
        let enums = self.btf.own_types().filter(|(_, ty)| matches!(ty.kind(), kind::ENUM | kind::ENUM64));
        let mut found = enums.filter(|(_, ty)| ty.name() == Some(name)).map(|(id, _)| self.btf.enumerators(id));
        found.find(|values| !values.is_empty()).unwrap_or_default()
    }

    /// Where the struct of this name has a member that isn't a bit field, also within what has no name; in bytes.
    pub(super) fn member_offset(&self, name: &str, member: &str) -> Option<u32> {
        let structs = self.btf.own_types().filter(|(_, ty)| ty.kind() == kind::STRUCT && ty.name() == Some(name));
        let mut bits = structs.filter_map(|(_, ty)| self.btf.member_offset(&ty, member));
        bits.next().map(|bits| bits / 8)
    }

    pub(super) fn btf(&self) -> &Btf {
        &self.btf
    }

    pub(super) fn function_names(&self) -> impl Iterator<Item = &str> {
        functions(&self.btf).map(|(_, name)| name)
    }

    pub(super) fn tracepoint_names(&self) -> impl Iterator<Item = &str> {
        tracepoints(&self.btf).map(|(_, name)| name)
    }

    fn name(&self, id: u32) -> Option<&str> {
        self.btf.type_at(id)?.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::btf_writer::Writer;
    use crate::kernel::canned::vmlinux;

    fn index() -> Index {
        Index::parse(vmlinux().finish(), None).unwrap()
    }

    fn params(signature: &Signature) -> Vec<String> {
        signature.params.iter().map(ToString::to_string).collect()
    }

    /// Functions are found by name, all of them where there are several; a module's index has none of its base.
    #[test]
    fn finds_functions() {
        let base = index();
        assert_eq!(params(&base.functions("ip_rcv")[0]), ["skb_t skb", "int n"]);
        assert_eq!(base.functions("int"), []);
        let mut w = Writer::on_top_of(&base.btf);
        w.func("help", 1, &[("skb", 4)]);
        w.func("help", 1, &[]);
        let module = Index::parse(w.finish(), Some(&base)).unwrap();
        assert_eq!(module.functions("help").len(), 2);
        assert_eq!(params(&module.functions("help")[0]), ["const struct sk_buff *skb"]);
        assert_eq!(module.functions("ip_rcv"), []);
    }

    /// A tracepoint's arguments get the names that a function of the same arguments gives them, if there is one.
    #[test]
    fn finds_tracepoints() {
        let index = index();
        let names: Vec<_> = index.tracepoint("kfree_skb").unwrap().params.into_iter().map(|param| param.name).collect();
        assert_eq!(names, ["skb", "reason"]);
        assert_eq!(params(&index.tracepoint("netif_rx").unwrap()), ["struct sk_buff *"]);
        assert_eq!(index.tracepoint("ip_rcv"), None);
        assert_eq!(index.tracepoint_names().count(), 2);
    }

    /// An enum's values; none for what is no enum.
    #[test]
    fn finds_enums() {
        let index = index();
        assert_eq!(index.enumerators("skb_drop_reason").len(), 2);
        assert_eq!(index.enumerators("wide"), [(7, "BIG".to_owned())]);
        assert_eq!(index.enumerators("sk_buff"), []);
    }
}
