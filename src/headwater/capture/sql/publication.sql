-- A publication: whether it says of changes what was there before.
select publication.pubupdate or publication.pubdelete as needs_identity
from pg_publication as publication
where publication.pubname = %(publication)s;
